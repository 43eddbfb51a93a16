"""What is lost where torch has no queue of seeds for GPUs that are not in use: it is hidden here."""

from __future__ import annotations

import pytest
import torch

from torchopt_dist import torch_private as private


def test_a_queued_seed_takes_the_place_of_the_earlier_and_can_be_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = torch.Generator()
    monkeypatch.setattr(torch.cuda, "default_generators", (gpu,))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    before = private.pending_gpu_seeds()
    private.queue_gpu_seed(5)
    queued = private.pending_gpu_seeds()
    assert queued != before
    assert queued is not None
    queued[2][-1][0]()
    assert gpu.initial_seed() == 5
    private.set_pending_gpu_seeds(before)
    assert private.pending_gpu_seeds() == before
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    private.set_pending_gpu_seeds((None, None, []))
    assert gpu.initial_seed() == torch.Generator().initial_seed()
    private.set_pending_gpu_seeds(before)


def test_without_the_name_nothing_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cuda, "_lazy_seed_tracker")
    private.queue_gpu_seed(5)
    private.set_pending_gpu_seeds((None, None, []))
    assert private.pending_gpu_seeds() is None
