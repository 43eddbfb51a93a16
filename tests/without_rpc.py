"""Tests → which of them run where torch has no RPC, as in its builds for macOS and Windows.

``make without-rpc`` runs all that start workers with such a torch, and ``make test`` a quarter of those of calls: the
workers of the files ``HERE`` have one. What is of torch's RPC itself has the marker ``torch_rpc``, or a parameter
``"rpc"``.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch.distributed import rpc

FOLDER = Path(__file__).parent / "distributed" / "transport" / "torch_without_rpc"
"""On ``PYTHONPATH`` of a new Python, this makes its torch such a one."""
VARIABLE = "TODIST_TESTS_WITHOUT_RPC"
"""Set where ``tests.processes.World`` is to start such workers."""
HERE = re.compile(
    r"tests/distributed/(worker/|messages/test_(references|stacked|globals)|group/|calls/test_(nested|local|tree|errors"
    r"|gradient_errors|graphs_are_freed|late_workers)|test_(map|mirror|adaptation|barrier|logs|profile|reduce|split"
    r"|status|partition|inner_loops))"
)
IMPORTS_IT = re.compile(
    r"^(from|import) torch(\._C\._distributed_rpc|opt_dist\.distributed\.transport\.rpc)\b", re.M
)


def needs_rpc(item: pytest.Item) -> bool:
    """Whether a test is of torch's RPC itself."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    return item.get_closest_marker("torch_rpc") is not None or any(
        isinstance(value, str) and value == "rpc" for value in params.values()
    )


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where this torch has no RPC, deselect the tests of it."""
    if not rpc.is_available():
        left = [item for item in items if needs_rpc(item)]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]


def cannot_be_imported(path: Path) -> bool:
    """Whether a file of tests is of torch's RPC as a whole, and there is none."""
    return not rpc.is_available() and IMPORTS_IT.search(path.read_text("utf-8")) is not None


def hides_rpc(item: pytest.Item) -> bool:
    """Whether the workers of a test have a torch without RPC."""
    return HERE.match(item.nodeid) is not None and not needs_rpc(item)
