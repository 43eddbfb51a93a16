"""Random programs of remote calls compute what one process does, to the third derivative, whatever the options.

The transport and what counts as a large tensor are random, too, and nothing may be left of the calls.

``make fuzz`` runs more of them, from a seed by chance. ``TODIST_FUZZ_SEED=<seed>`` runs the programs from this seed
on, and ``TODIST_FUZZ_PROGRAMS`` says how many. With ``TODIST_FUZZ_HEDGES=1`` shares also begin on two workers at once.
"""

from __future__ import annotations

import os
import random

import pytest
import torch

from tests.distributed.random_calls import Here
from tests.distributed.random_programs import check, differences, draw, evaluate
from tests.processes import World

MORE = os.environ.get("TODIST_FUZZ_PROGRAMS")
SEED = int(os.environ.get("TODIST_FUZZ_SEED") or (random.randrange(10**9) if MORE else 0))
PROGRAMS = [int(MORE)] if MORE else [8, pytest.param(44, marks=pytest.mark.nightly)]
SIZES = (1, 2, 3, 4)


@pytest.mark.timeout(max(300, int(MORE or 0)))
@pytest.mark.parametrize("programs", PROGRAMS)
@pytest.mark.parametrize("size", SIZES)
def test_random_programs_are_those_of_one_process(world: type[World], size: int, programs: int) -> None:
    number = -(-programs // len(SIZES))
    transport = random.Random(SEED + size).choice(["auto", "zmq"])
    print(f"TODIST_FUZZ_SEED={SEED}: {number} programs on {size} workers over {transport}")
    told = world(size).on_zero(
        differences, SEED, number, size, timeout=max(100, programs), on_loss="continue", transport=transport
    )
    assert not told, f"TODIST_FUZZ_SEED={SEED}: {len(told)} of {number} differ; the first: {told[0]}"


def test_a_wrong_derivative_would_be_seen() -> None:
    class Wrong(Here):
        def call(self, *args: object) -> object:
            return [x + 1e-6 * x.detach() - 1e-6 * x for x in super().call(*args)]  # the values are right

    seen = 0
    for seed in range(20):
        program = draw(seed, 3)
        with torch.random.fork_rng():
            right, wrong = evaluate(program, seed, Here()), evaluate(program, seed, Wrong())
        torch.testing.assert_close(wrong[: len(program.losses)], right[: len(program.losses)])
        try:
            check(program, seed, wrong)
        except AssertionError:
            seen += 1
    assert seen > 10
