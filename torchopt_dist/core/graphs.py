"""Tensors → the graph behind them: its edges, its nodes, its leaves."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from torchopt_dist.torch_private import sequence_numbers

__all__ = [
    "Edge",
    "depends_on_others",
    "edge_of",
    "edges_behind",
    "edges_of",
    "leaf_of",
    "leaves_behind",
    "nodes_between",
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


def nodes_between(outputs: Iterable[Tensor], inputs: Iterable[Tensor], since: int = 0) -> list[Any]:
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


def depends_on_others(output: Tensor, inputs: Iterable[Tensor], since: int) -> bool:
    """Whether a tensor may depend on a leaf other than by operations on the inputs since a given node.

    It is asked in every step, so the walk is here as short as it can be.
    """
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


def leaf_of(node: Any) -> Tensor | None:
    """The leaf whose gradient a node accumulates, if it is such a node."""
    variable = getattr(node, "variable", None)
    return variable if isinstance(variable, Tensor) else None
