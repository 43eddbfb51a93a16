"""A GPU comes into use in the middle of a step or a task: its numbers are those of the seed, and then the user's again.

There is no GPU here: one of the CPU's generators stands for that of a GPU, which torch seeds when it comes into use.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torchopt_dist as todist
from torchopt_dist.core import generators, random_turns


class Gpu:
    """One that comes into use when a number is drawn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.in_use = False
        self.generator = torch.Generator()
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: self.in_use)
        monkeypatch.setattr(torch.cuda, "default_generators", (self.generator,))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr("torch.cuda.random.device_count", lambda: 1)
        monkeypatch.setattr("torch.cuda.random.current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "_lazy_seed_tracker", type(torch.cuda._lazy_seed_tracker)())
        for module in (generators, random_turns):
            monkeypatch.setattr(module, "WITH_GPUS", True)

    def rand(self) -> Tensor:
        if not self.in_use:
            for call, _ in filter(None, torch.cuda._lazy_seed_tracker.get_calls()):
                call()
            self.in_use = True
        return torch.rand(3, generator=self.generator)


HERE: list[Gpu] = []


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    HERE[:] = [Gpu(monkeypatch)]
    return HERE[0]


def noise(index: Tensor) -> Tensor:
    return HERE[0].rand() + 0 * index


def user_numbers(seed: int) -> Tensor:
    return torch.rand(3, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("adjoint", [todist.Recorded(), todist.Replayed()], ids=repr)
def test_steps_draw_the_same_whether_the_gpu_was_in_use_or_not(gpu: Gpu, adjoint: object) -> None:
    def losses() -> Tensor:
        w = torch.ones(3, requires_grad=True)
        made = todist.inner_loop(
            lambda w: (w * gpu.rand()).sum(), todist.sgd(lr=0.1), w, 3, seed=5, adjoint=adjoint
        )
        torch.autograd.grad(made.params.sum(), w)
        return made.losses.detach()

    torch.manual_seed(4)
    first = losses()
    assert torch.equal(gpu.rand(), user_numbers(4))  # as if the loop had not been
    assert torch.equal(losses(), first)


@pytest.mark.usefixtures("gpu")
def test_tasks_draw_the_same_whether_the_gpu_was_in_use_or_not() -> None:
    def drawn() -> Tensor:
        torch.manual_seed(3)
        spread = todist.parallelize(todist.tasks, todist.stack_reducer)
        return spread(noise)(torch.arange(3.0))

    rows = todist.auto_init_rpc()(lambda: [drawn(), drawn()])()
    assert torch.equal(*rows)
    assert len({tuple(row) for row in rows[0].tolist()}) == 3


def test_a_seed_that_waits_for_the_gpu_still_waits_after_a_loop_without_it(gpu: Gpu) -> None:
    torch.cuda.manual_seed(9)
    torch.manual_seed(8)
    torch.cuda.manual_seed(7)
    todist.inner_loop(lambda w: w.sum(), todist.sgd(lr=0.1), torch.ones(2, requires_grad=True), 2, seed=5)
    assert torch.equal(gpu.rand(), user_numbers(7))


def test_nobody_has_seeded_it(gpu: Gpu) -> None:
    before = generators.states()
    generators.seed_all(1)
    assert torch.equal(gpu.rand(), user_numbers(1))
    assert generators.have_changed(before)
    generators.restore(before)
    assert torch.equal(gpu.rand(), user_numbers(torch.Generator().initial_seed()))


def test_without_torchs_queue_the_gpu_is_left_alone(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cuda, "_lazy_seed_tracker")
    before = generators.states()
    generators.seed_all(1)
    assert not generators.have_changed([before[1]])
    generators.restore(before)
