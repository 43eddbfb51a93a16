"""Random programs of remote calls compute what one process does, to the third derivative.

``make fuzz`` runs more of them. ``TODIST_FUZZ_SEED=<seed>`` runs the programs from this seed on, and
``TODIST_FUZZ_PROGRAMS`` says how many.
"""

from __future__ import annotations

import os
import random

import pytest
import torch

from tests.distributed.random_programs import Here, differences, draw, evaluate
from tests.worlds import World

SEED = int(os.environ.get("TODIST_FUZZ_SEED") or random.randrange(10**9))
PROGRAMS = int(os.environ.get("TODIST_FUZZ_PROGRAMS") or 51)
SIZES = (1, 2, 3)


@pytest.mark.timeout(max(300, PROGRAMS))
@pytest.mark.parametrize("size", SIZES)
def test_random_programs_are_those_of_one_process(world: type[World], size: int) -> None:
    number = -(-PROGRAMS // len(SIZES))
    print(f"TODIST_FUZZ_SEED={SEED}: {number} programs on {size} workers")
    told = world(size).on_zero(differences, SEED, number, size, timeout=max(100, PROGRAMS))
    assert not told, f"TODIST_FUZZ_SEED={SEED}: {len(told)} of {number} differ; the first: {told[0]}"


def test_a_wrong_derivative_would_be_seen() -> None:
    class Wrong(Here):
        def call(self, kind: str, worker: int, *args: object) -> object:
            first, *others = super().call(kind, worker, *args)
            return [first + 1e-6 * first.detach() - 1e-6 * first, *others]  # the value is right

    seen = 0
    for seed in range(20):
        program = draw(seed, 3)
        with torch.random.fork_rng():
            right, wrong = evaluate(program, seed, Here()), evaluate(program, seed, Wrong())
        torch.testing.assert_close(wrong[: len(program.losses)], right[: len(program.losses)])
        try:
            torch.testing.assert_close(wrong, right, rtol=1e-9, atol=1e-10)
        except AssertionError:
            seen += 1
    assert seen > 10
