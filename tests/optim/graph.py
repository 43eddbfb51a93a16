"""A tensor → the number of nodes in the graph behind it."""


def count_nodes(*tensors):
    seen, todo = set(), [tensor.grad_fn for tensor in tensors]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo.extend(parent for parent, _ in node.next_functions)
    return len(seen)
