"""Pictures of large graphs, and that these can be freed afterwards."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from torchopt_dist.visual import make_dot

DEPTH = 40_000  # without a remedy the process dies some 30,000 operations deep


def deep(start=None):
    out = torch.ones(1, requires_grad=True) if start is None else start
    for _ in range(DEPTH):
        out = out.neg()
    return out


def ladder():
    """Two ways down, so that no operation has one user only."""
    out = torch.ones(1, requires_grad=True)
    for _ in range(DEPTH // 2):
        out = out.neg() + out
    return out


def wide():
    w = torch.ones(1, requires_grad=True)
    return torch.stack([w.neg() for _ in range(DEPTH)])


@pytest.mark.parametrize("graph", [deep, ladder, wide])
def test_a_large_graph_meets_no_recursion_limit_then_or_when_it_is_freed(graph):
    out = graph()
    middle = out.grad_fn.next_functions[0][0]
    assert sum("Backward0" in line for line in make_dot(out).body) in (DEPTH, DEPTH + 1)
    gone = []
    middle.metadata["at the end"] = Signal(gone)
    del middle, out
    gc.collect()
    assert gone == [True]


def test_a_large_graph_is_freed_part_by_part_and_in_another_thread():
    gone = []
    out = deep(watched(gone))
    later = [out.neg().neg()]
    make_dot(later[0])
    del out
    assert gone == []
    thread = threading.Thread(target=later.clear)
    thread.start()
    thread.join()
    gc.collect()
    assert gone == [True]
    first = deep(watched(gone))
    make_dot({"first": first, "second": first.neg()})
    del first
    gc.collect()
    assert gone == [True, True]


def watched(gone):
    """The result of an operation that tells of its end."""
    out = torch.ones(1, requires_grad=True).neg()
    out.grad_fn.metadata["at the end"] = Signal(gone)
    return out


class Signal:
    def __init__(self, gone):
        self.gone = gone

    def __del__(self):
        self.gone.append(True)
