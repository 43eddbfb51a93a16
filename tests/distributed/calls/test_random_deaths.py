"""Workers die at random requests of random programs of calls with retries: these compute what one process does.

Without them they do, or end with the error that a worker is lost. Nothing may be left of the calls on those that live,
and no program may wait for ever.

``make losses`` runs more of them, from a seed by chance. ``TODIST_FUZZ_SEED=<seed>`` runs the programs from this seed
on, and ``TODIST_FUZZ_DEATHS`` says how many.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

import torchopt_dist as todist
from tests.distributed.calls.test_lost_workers import survive
from tests.distributed.random_calls import FAILURES, Call, There
from tests.distributed.random_programs import Program, check, draw, evaluate, nothing_is_left, set_thresholds
from torchopt_dist.distributed.worker import handler

MORE = os.environ.get("TODIST_FUZZ_DEATHS")
SEED = int(os.environ.get("TODIST_FUZZ_SEED") or random.randrange(10**9))
WAITED_FOR_EVER = [1, 20, 29, 35, 48, 74]
"""Once."""
LEFT_GRAPHS = [3, 12, 20, 22, 30, 39]
"""Once."""


def seeds(known: list[int]) -> list[Any]:
    """Those by chance that are asked for; otherwise the known ones, of which the last are nightly."""
    if MORE:
        return [*range(SEED, SEED + int(MORE))]
    return [*known[:3], *(pytest.param(seed, marks=pytest.mark.nightly) for seed in known[3:])]


SLOW = 20.0
"""Seconds."""
WORKERS = 4
IMMORTAL = 1 << 30
_answered = [0]


def retried(code: list[Any]) -> list[Any]:
    """The same code, whose calls outlive all workers that die; those that are to fail are left out."""
    found: list[Any] = []
    for instruction in code:
        if not isinstance(instruction, Call):
            found.append(instruction)
        elif instruction.kind not in FAILURES:
            kept = ("vectorize", "chunk_size", "strict", "device", "fan_out")
            options = {name: value for name, value in instruction.options.items() if name in kept}
            options["retries"] = WORKERS - 1
            found.append(replace(instruction, code=retried(instruction.code), options=options))
    return found


def without_failures(code: list[Any]) -> list[Any]:
    """The same code without the calls that fail of themselves."""
    return [each for each in code if not (isinstance(each, Call) and each.kind in FAILURES)]


def die_at(number: int, *, before: bool) -> None:
    """On a worker: let it die at this request, before it answers it or when the answer is ready."""
    _answered[0] = 0
    answer = handler.answer

    def counting(*args: Any, **kwargs: Any) -> Any:
        _answered[0] += 1
        is_last = _answered[0] == number
        if is_last and before:
            os.kill(os.getpid(), signal.SIGKILL)
        reply = answer(*args, **kwargs)
        if is_last and _answered[0] < IMMORTAL:
            os.kill(os.getpid(), signal.SIGKILL)
        return reply

    handler.answer = counting


def live_on() -> None:
    """On a worker: let it not die any more."""
    _answered[0] = IMMORTAL


def run(seed: int, *, retries: bool) -> str:
    """On rank 0: run the program of a seed, while others die; returns "right", or "lost" if that was the error."""
    chance = random.Random(seed)
    program: Program = draw(seed, WORKERS)
    program = replace(program, code=retried(program.code) if retries else without_failures(program.code))
    for rank in range(WORKERS):
        todist.remote_call(set_thresholds, rank, program.thresholds)
    for rank in chance.sample(range(1, WORKERS), chance.randint(1, WORKERS - 1)):
        number = chance.choice([1, 1, 2, 2, 3, 4, 5, 7, 10])
        todist.remote_call(die_at, rank, number, before=chance.random() < 0.5)
    runner = There()
    found = None
    began = time.monotonic()
    try:
        found = evaluate(program, seed, runner)
    except todist.WorkerLostError:
        assert not retries
    took = time.monotonic() - began
    runner.settle()
    del runner
    alive = [0]
    for rank in range(1, WORKERS):
        try:
            todist.remote_call(live_on, rank)
            alive.append(rank)
        except todist.WorkerLostError:
            pass
    told = "lost" if found is None else "right"
    if found is not None:
        check(program, seed, found)
    del found
    gc.collect()  # an error refers to frames, and some of these to what holds the error
    nothing_is_left(alive)
    assert took < SLOW, took
    return told


@pytest.mark.parametrize("seed", seeds(WAITED_FOR_EVER))
def test_programs_whose_workers_die_compute_what_one_process_does(world, seed):
    transport = random.Random(seed).choice(["auto", "zmq"])
    print(f"TODIST_FUZZ_SEED={seed}: over {transport}")
    assert survive(world(WORKERS), partial(run, retries=True), seed, transport=transport) == "right"


@pytest.mark.parametrize("seed", seeds(LEFT_GRAPHS))
def test_programs_with_few_retries_end_with_an_error_at_once_and_leave_nothing(world, seed):
    transport = random.Random(seed).choice(["auto", "zmq"])
    print(f"TODIST_FUZZ_SEED={seed}: over {transport}")
    assert survive(world(WORKERS), partial(run, retries=False), seed, transport=transport) in (
        "lost",
        "right",
    )
