"""Every program of torchopt_distributed.rst, with 2 and 3 workers → one process's gradients."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.processes import PROGRAMS, ROOT, free_port, torchrun
from tests.rows import each_row
from tests.seeds.findings import compare
from tests.seeds.one_process import DOCUMENTED, EVERY_WAY

pytestmark = pytest.mark.torch_rpc
DOCUMENT = ROOT.parent / "shared" / "seeds" / "torchopt_distributed.rst"
ON_EVERY_RANK = ("autograd_grad", "local_rank", "rank_zero_only", "remote_async_call", "remote_sync_call")


@pytest.fixture(scope="module", params=[2, 3])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """The number of workers, and the directory of what the programs found, all run in one start of torchrun."""
    out = tmp_path_factory.mktemp("found")
    torchrun(
        "--standalone",
        f"--nproc_per_node={request.param}",
        PROGRAMS / "one_after_another.py",
        out,
        *DOCUMENTED,
        "every_way",
    )
    return request.param, out


@each_row("dtype", ["float32", "float64"])
@each_row("program", [*DOCUMENTED, *EVERY_WAY])
def test_gradients_are_those_of_one_process(found: tuple[int, Path], program: str, dtype: str) -> None:
    workers, out = found
    for rank in range(workers if program in ON_EVERY_RANK else 1):
        compare(out, program, dtype, rank)


@pytest.mark.nightly
def test_full_example_from_the_command_line(tmp_path: Path) -> None:
    torchrun(
        "--nnodes=1",
        "--nproc_per_node=2",
        f"--master_port={free_port()}",
        *("-m", "torchopt_dist.compat", PROGRAMS / "full_example.py"),
        *("--dtype", "float64", "--out", tmp_path),
        warm=False,
    )
    compare(tmp_path, "full_example", "float64")


def test_world_information_and_worker_selection(found: tuple[int, Path]) -> None:
    workers, out = found
    for rank in range(workers):
        info = json.loads((out / f"local_rank-float32-{rank}.json").read_text())
        assert (info["ranks"], info["places"], info["sizes"]) == ([rank] * 4, [rank] * 2, [workers] * 2)
        counts = json.loads((out / f"rank_zero_only-float32-{rank}.json").read_text())["counts"]
        assert counts == ([0, 2, 1] if rank == 0 else [1, 0, 0])  # greetings, logs, checkpoints


def test_programs_hold_the_documents_lines() -> None:
    if not DOCUMENT.exists():
        pytest.skip(f"the document is not here: {DOCUMENT}")
    blocks = python_blocks(DOCUMENT.read_text())
    assert len(blocks) == len(DOCUMENTED)
    for name, block in zip(DOCUMENTED, blocks, strict=True):
        program = iter((PROGRAMS / f"{name}.py").read_text().splitlines())
        for line in block:
            pattern = ".+".join(re.escape(part) for part in line.split("..."))
            assert any(re.fullmatch(pattern, found.strip()) for found in program), (
                f"{name}.py lacks, or has in another place: {line}"
            )


def python_blocks(document: str) -> list[list[str]]:
    """The lines of each Python block but the blank ones and those that are nothing but `...`."""
    blocks: list[list[str]] = []
    indent = None
    for line in document.splitlines():
        text, depth = line.strip(), len(line) - len(line.lstrip())
        if text == ".. code-block:: python":
            indent = depth
            blocks.append([])
        elif text and indent is not None and depth <= indent:
            indent = None
        elif text and indent is not None and text != "..." and not re.match(r":[\w-]+:", text):
            blocks[-1].append(text)
    return blocks
