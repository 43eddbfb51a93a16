"""What tests of compiled loops share."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from tests.diff.compiled_runs import made
from torchopt_dist.core import programs


@pytest.fixture
def graphs_as_they_are(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Programs run torch's ops, and none is there yet; that a program is not made is an error."""

    def noted(_captured: bool, graph: Any, _inputs: Any) -> Any:
        made.append(graph)
        return graph

    monkeypatch.setattr(programs, "kernels", noted)
    programs.programs_of.cache_clear()
    made.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*compile=True")
        yield
