"""One inner loop on several ranks gives what it gives on one."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import torchopt_dist as todist
from tests.diff import data_parallel_cases as cases

NAMES = [
    *(f"{adjoint} {optimizer}" for optimizer, adjoint in cases.CASES),
    *(f"{kind} {name}" for kind in ("tied", "stop") for name in ("recorded", "sharded", "snapshots")),
    *(f"{kind} {name}" for kind in ("second", "vmap") for name in ("recorded", "replayed")),
    "long sharded",
    "unused replayed",
]


@cache
def alone() -> dict[str, Any]:
    return cases.answers(0, 1)


@cache
def together(size: int) -> list[dict[str, Any]]:
    made = todist.launch(cases.on_rank, nproc_per_host=size, backend="gloo")
    return [made.rank(rank) for rank in range(size)]


def close(one: Any, other: Any) -> None:
    """Numbers are the same up to rounding; no gradient is the same as one of zeros."""
    one, other = (None if x is None else torch.tensor(x, dtype=torch.float64) for x in (one, other))
    if one is None or other is None:
        assert not (other if one is None else one).count_nonzero()
        return
    torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_ranks_give_what_one_gives(name: str, size: int) -> None:
    own, *rest = alone()[name]
    of_ranks = [of_rank[name] for of_rank in together(size)]
    if own is not None:
        joined = [of_ranks[place % size][0][place // size] for place in range(len(own))]
        close(own, joined)
    for _, *others in of_ranks:
        for one, other in zip(rest, others, strict=True):
            if one is not None or other is not None:
                close(one, other)
        assert others == of_ranks[0][1:]  # the same bits on all ranks
