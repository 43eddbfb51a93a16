"""Tensors → the graph behind them: its edges, its nodes, its leaves."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from torchopt_dist.torch_private import sequence_numbers

__all__ = ["Edge", "edge_of", "edges_behind", "leaf_of", "leaves_behind", "nodes_between"]

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


def edges_behind(
    outputs: Iterable[Tensor], ends: Container[Edge] = (), since: int = 0
) -> Iterator[tuple[Edge, bool]]:
    """The edges of the graph on which outputs depend, those of leaves included, and whether the walk ends at each.

    Args:
        outputs: tensors.
        ends: edges; what is behind them is left out.
        since: the number of a node; what is behind older ones is left out.
    """
    waiting = list(dict.fromkeys(edge_of(output) for output in outputs if output.requires_grad))
    seen = set(waiting)
    number = sequence_numbers(waiting[0][0]) if since and waiting else None
    for edge in waiting:  # which grows
        is_end = edge in ends or (number is not None and number(edge[0]) < since)
        yield edge, is_end
        if not is_end:
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
    ends = {edge_of(tensor) for tensor in inputs if tensor.requires_grad}
    return [edge[0] for edge, is_end in edges_behind(outputs, ends, since) if not is_end]


def leaves_behind(values: Iterable[Tensor], inputs: Iterable[Tensor]) -> tuple[set[int], list[Tensor]]:
    """The ids of those inputs on which values depend, and the leaves on which they depend other than through these."""
    inputs = list(inputs)
    known = {id(x) for x in inputs}
    ends = {edge_of(x): id(x) for x in inputs if x.grad_fn is not None}
    reached: set[int] = set()
    others: list[Tensor] = []
    for edge, is_end in edges_behind(values, ends):
        if is_end:
            reached.add(ends[edge])
        elif (leaf := leaf_of(edge[0])) is not None and id(leaf) not in known:
            others.append(leaf)
        elif leaf is not None:
            reached.add(id(leaf))
    return reached, others


def leaf_of(node: Any) -> Tensor | None:
    """The leaf whose gradient a node accumulates, if it is such a node."""
    variable = getattr(node, "variable", None)
    return variable if isinstance(variable, Tensor) else None
