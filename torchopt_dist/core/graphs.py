"""Tensors → the graph behind them: its edges, nodes and leaves; a deep one is freed without overflowing the stack."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from torchopt_dist.torch_private import (
    bytes_of_results,
    engine_needs_node,
    next_sequence_number,
    sequence_numbers,
    transforms_are_active,
)

__all__ = [
    "Edge",
    "bytes_behind",
    "edge_of",
    "edges_behind",
    "edges_of",
    "graph_is_recorded",
    "leaf_of",
    "leaves_behind",
    "looks_for_others",
    "make_freeable",
    "nodes_between",
    "pass_needs",
]


Edge = tuple[Any, int]
"""A node of the graph, and which of its results."""


def edge_of(tensor: Tensor) -> Edge:
    """The node that made a tensor, or that accumulates a leaf's gradient, and which of its results the tensor is."""
    with torch.enable_grad():
        if (
            tensor.grad_fn is None and tensor.layout != torch.strided
        ):  # torch asks a view, which a sparse tensor lacks
            copied: Any = tensor.clone().grad_fn
            found: Edge = copied.next_functions[0]
            return found
        edge = torch.autograd.graph.get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def edges_of(tensors: Iterable[Tensor]) -> list[Edge]:
    """The edges of those that have a graph, or are leaves that require grad."""
    return [edge_of(tensor) for tensor in tensors if tensor.requires_grad]


def edges_behind(
    starts: Iterable[Edge], ends: Container[Edge] = (), since: int = 0
) -> Iterator[tuple[Edge, bool]]:
    """Some edges of the graph and all that lead on from them, each once, and whether the walk ends there.

    Args:
        starts: edges.
        ends: likewise; what is behind them is left out.
        since: the number of a node; what is behind older ones is left out.
    """
    waiting = list(dict.fromkeys(starts))
    seen = set(waiting)
    left: set[Any] = set()
    """Nodes whose arguments have been seen: one may have made all parameters of a step, each of which is an edge."""
    number = sequence_numbers(waiting[0][0]) if since and waiting else None
    while waiting:
        edge = waiting.pop()
        is_end = edge in ends or (number is not None and number(edge[0]) < since)
        yield edge, is_end
        if not is_end and edge[0] not in left:
            left.add(edge[0])
            for following in edge[0].next_functions:
                if following not in seen and following[0] is not None:
                    seen.add(following)
                    waiting.append(following)


def nodes_between(outputs: Iterable[Tensor], inputs: Iterable[Tensor] = (), since: int = 0) -> list[Any]:
    """The nodes of the graph on which outputs depend other than through the inputs, those of leaves included.

    Args:
        outputs: tensors.
        inputs: likewise.
        since: as in :func:`edges_behind`; older nodes are left out, too.
    """
    walk = edges_behind(edges_of(outputs), set(edges_of(inputs)), since)
    return [node for (node, _), is_end in walk if not is_end]


def leaves_behind(values: Iterable[Tensor], inputs: Iterable[Tensor] = ()) -> tuple[set[int], list[Tensor]]:
    """The ids of those inputs on which values depend, and the leaves on which they depend other than through these."""
    inputs = list(inputs)
    known = {id(x) for x in inputs}
    ends = {edge_of(x): id(x) for x in inputs if x.grad_fn is not None}
    reached: set[int] = set()
    others: list[Tensor] = []
    for edge, is_end in edges_behind(edges_of(values), ends):
        if is_end:
            reached.add(ends[edge])
        elif (leaf := leaf_of(edge[0])) is not None and id(leaf) not in known:
            others.append(leaf)
        elif leaf is not None:
            reached.add(id(leaf))
    return reached, others


def looks_for_others() -> Callable[[Tensor, Iterable[Tensor]], bool]:
    """A function: whether a tensor may depend on a leaf other than by operations from now on, on the given inputs.

    It is called in every step, so the walk is there as short as it can be.
    """
    since = next_sequence_number()

    def depends_on_others(output: Tensor, inputs: Iterable[Tensor]) -> bool:
        known = {id(tensor) for tensor in inputs}
        if output.grad_fn is None:
            return output.requires_grad and id(output) not in known
        number = sequence_numbers(output.grad_fn)
        visited: set[Any] = {None, output.grad_fn}
        waiting: list[Any] = [output.grad_fn]
        for node in waiting:  # which grows
            if number(node) < since:
                return True
            if following := node.next_functions:
                for other, _ in following:
                    if other not in visited:
                        visited.add(other)
                        waiting.append(other)
            elif (leaf := leaf_of(node)) is not None and id(leaf) not in known:
                return True
        return False

    return depends_on_others


def bytes_behind(output: Tensor) -> int:
    """How many bytes the results of all nodes of a graph take; views count as well."""
    return sum(map(bytes_of_results, nodes_between([output])))


def graph_is_recorded() -> bool:
    """Whether what is computed here has a graph that can be walked, which the transforms of ``torch.func`` hide."""
    return torch.is_grad_enabled() and not transforms_are_active()


def pass_needs(tensor: Tensor) -> bool:
    """Whether the backward pass that runs in this thread goes on to the node of a tensor, or to one behind it."""
    return any(map(engine_needs_node, nodes_between([tensor])))


def leaf_of(node: Any) -> Tensor | None:
    """The leaf whose gradient a node accumulates, if it is such a node."""
    variable = getattr(node, "variable", None)
    return variable if isinstance(variable, Tensor) else None


STRIDE = 1000
"""How many operations deep a graph may be freed by recursion."""


def make_freeable(nodes: list[Node]) -> None:
    """Let a deep graph be freed, whenever that will be, without overflowing the stack.

    Torch 2.13 frees a graph that Python has walked through by recursion, and some 30,000 operations deep the
    process dies. So each ``STRIDE``-th level gets a :class:`_Link`, which ends the recursion.
    """
    if len(nodes) <= STRIDE:
        return
    sources = {node: [source for source, _ in node.next_functions if source is not None] for node in nodes}
    users = Counter(source for node in nodes for source in sources[node])
    level = dict.fromkeys(nodes, 0)
    ready = [node for node in nodes if not users[node]]
    while ready:
        node = ready.pop()
        for source in sources[node]:
            level[source] = max(level[source], level[node] + 1)
            users[source] -= 1
            if not users[source]:
                ready.append(source)
    for node in nodes:
        below = [source for source in sources[node] if level[source] // STRIDE > level[node] // STRIDE]
        if below:
            metadata: Any = node.metadata  # torch's annotation says method, but it is a property
            metadata["torchopt_dist.visual"] = _Link(below)


class _Freeing(threading.local):
    def __init__(self) -> None:
        self.waiting: list[Node] = []
        self.under_way = False


_FREEING = _Freeing()


class _Link:
    """Holds operations for the one that uses them; when that is freed they are freed in a loop."""

    def __init__(self, below: list[Node]) -> None:
        self._below = below

    # A default is still there when modules are taken down.
    def __del__(self, freeing: _Freeing = _FREEING) -> None:
        freeing.waiting += self._below
        self._below = []
        if freeing.under_way:
            return  # the loop is further up the stack
        freeing.under_way = True
        while freeing.waiting:
            freeing.waiting.pop()
        freeing.under_way = False
