"""The files that the programs write → a comparison with one process, to 1e-6 in float32 and 1e-12 in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.seeds.one_process import expected

TOLERANCE = {"float32": 1e-6, "float64": 1e-12}


def compare(out: Path, program: str, dtype: str, rank: int = 0) -> None:
    """Fail unless the loss and every gradient that a rank found are those of one process."""
    for name, (got, truth) in findings(out, program, dtype, rank).items():
        error = relative_error(got, truth)
        assert error <= TOLERANCE[dtype], f"{program} {dtype}, rank {rank}: {name} is off by {error:.1e}"


def findings(
    out: Path, program: str, dtype: str, rank: int = 0
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """For each tensor that a program found: it, and what it should be."""
    values: dict[str, Any] = json.loads((out / f"{program}-{dtype}-{rank}.json").read_text())
    pairs = {}
    for name, truth in expected(program, getattr(torch, dtype)).items():
        if isinstance(truth, torch.Tensor):
            values[name], truth = [values[name]], [truth]
        for index, (one, other) in enumerate(zip(values[name], truth, strict=True)):
            pairs[f"{name}[{index}]"] = torch.tensor(one, dtype=torch.float64), other.detach().double()
    return pairs


def relative_error(got: torch.Tensor, truth: torch.Tensor) -> float:
    """The largest difference, by the largest value."""
    assert got.shape == truth.shape
    return float((got - truth).abs().max() / truth.abs().max())
