"""One node may have made all parameters of a step → graphs are gone through in a time that grows with their number."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchopt_dist.core.graphs import edges_behind
from torchopt_dist.core.second_order import nodes_of
from torchopt_dist.core.vjp import edges, pulled_back


class Node:
    """One of a graph, which counts how often its arguments are asked for."""

    def __init__(self, *arguments: Any) -> None:
        self._arguments, self.asked = arguments, 0

    @property
    def next_functions(self) -> tuple[Any, ...]:
        self.asked += 1
        return self._arguments

    def _sequence_nr(self) -> int:
        return 1


def test_a_node_of_many_results_is_asked_once() -> None:
    leaf = Node()
    one = Node(*[(leaf, 0)] * 5)
    other = Node(*[(one, place) for place in range(5)])
    starts = [(other, place) for place in range(5)]
    found = [edge for edge, _ in edges_behind(starts, {(one, 3)})]
    assert set(found) == {*starts, *((one, place) for place in range(5)), (leaf, 0)}
    assert [node.asked for node in (other, one, leaf)] == [1, 1, 1]
    outputs: Any = [SimpleNamespace(grad_fn=other) for _ in range(5)]
    assert nodes_of(outputs) == [other, one, leaf]
    assert [node.asked for node in (other, one, leaf)] == [2, 2, 2]


def test_edges_are_differentiated_without_a_look_at_all_results_of_their_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.arange(1.0, 4.0).requires_grad_()
    values = [*(x**2).unbind(), x.detach()]

    def looked(*_args: object) -> Any:
        raise AssertionError("each edge was looked at, for which torch asks its node for all results")

    monkeypatch.setattr(torch.autograd, "_make_grads", looked)
    bars = [torch.tensor(2.0), None, torch.tensor(3.0), None]
    (grad,) = pulled_back(edges(values), bars, [x])
    assert grad is not None
    assert grad.tolist() == [4.0, 0.0, 18.0]
