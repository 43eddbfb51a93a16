"""The notebooks among the examples, run by kernels of their own: numbers, errors, and what is left behind."""

from __future__ import annotations

import base64
import contextlib
import io
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import nbformat
import numpy as np
import psutil
import pytest
import torch
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager, start_new_kernel
from nbclient import NotebookClient
from PIL import Image

from tests.launch.families import alive, assert_gone, family_of

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples" / "launch_from_a_notebook.ipynb"
FEW_SHOT = ROOT / "examples" / "few_shot.ipynb"
SMALL = """
SCRIPTS = {"train": ["GREEK"], "validation": ["COPTIC"], "test": ["ARMENIAN"]}
STEPS, TASKS, WIDTH, TESTS = 20, 4, 8, 40
"""


@pytest.fixture(scope="module", autouse=True)
def folders_of_jupyter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Kernels find the package from anywhere, and what Jupyter and IPython write is not in the user's folders."""
    folder = tmp_path_factory.mktemp("jupyter")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        for variable in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR"):
            patch.setenv(variable, str(folder / variable.lower()))
        yield


def working_in(folder: Path) -> list[int]:
    """The processes that are alive in a folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if Path(process.cwd()) == folder:
                found.append(process.pid)
        except psutil.Error:  # it has ended, or is somebody else's
            continue
    return found


def at_work_in(folder: Path) -> list[int]:
    """The processes that are alive in a folder and are no forkservers, of which one imports what is not yet needed."""
    found = []
    for pid in working_in(folder):
        with contextlib.suppress(psutil.Error):
            if "forkserver" not in " ".join(psutil.Process(pid).cmdline()):
                found.append(pid)
    return found


def cell(notebook: nbformat.NotebookNode, name: str) -> nbformat.NotebookNode:
    (found,) = (cell for cell in notebook.cells if cell.id == name)
    return found


def stdout(cell: nbformat.NotebookNode) -> str:
    return "".join(output.text for output in cell.outputs if output.get("name") == "stdout")


def drawn(cell: nbformat.NotebookNode) -> tuple[int, int]:
    """The size of a cell's only picture, on which something is drawn."""
    (picture,) = (output for output in cell.outputs if output.output_type == "display_data")
    with Image.open(io.BytesIO(base64.b64decode(picture.data["image/png"]))) as image:
        assert np.asarray(image.convert("L")).std() > 10
        return image.size


def started(start: Callable[[], T]) -> T:
    """What has a kernel; begun anew where another test has taken a port that Jupyter had found free."""
    for _ in range(2):
        with contextlib.suppress(RuntimeError):
            return start()
    return start()


def execute(notebook: nbformat.NotebookNode, work: Path) -> None:
    """Run all cells in a folder, and see that no worker is left there while the kernel is, and nothing after it."""

    def start() -> NotebookClient:
        options = {"timeout": 250, "kernel_name": "python3", "resources": {"metadata": {"path": work}}}
        client = NotebookClient(notebook, **options)
        stack.enter_context(client.setup_kernel())
        return client

    with contextlib.ExitStack() as stack:
        client = started(start)
        for index, each in enumerate(notebook.cells):
            client.execute_cell(each, index)
        kernel_and_servers = working_in(work)
        assert len(at_work_in(work)) == 1  # the kernel; no agent, no worker
    assert_gone(kernel_and_servers)
    assert working_in(work) == []


@pytest.fixture
def definitions() -> dict[str, Any]:
    """The names of the notebook, in this process."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    names: dict[str, Any] = {"__name__": "notebook"}
    for name in ("imports", "definitions"):
        source = cell(notebook, name).source
        # Without the future features of this file.
        exec(compile(source.replace("%matplotlib inline", ""), name, "exec", dont_inherit=True), names)
    return names


def by_hand(names: dict[str, Any], steps: int) -> tuple[torch.nn.Module, list[float]]:
    """The notebook's training in this process alone, with torch's optimizers and no decorator of ours."""
    one_task = names["task_loss"].__wrapped__
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(1, 40), torch.nn.Tanh(), torch.nn.Linear(40, 1))
    outer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(steps):
        tasks = zip(*names["sines"](8, draw), strict=True)
        loss = torch.stack([one_task(model, *task) for task in tasks]).mean()
        outer.zero_grad()
        loss.backward()
        outer.step()
        losses.append(loss.item())
    return model, losses


def held_out(names: dict[str, Any], model: torch.nn.Module) -> float:
    tasks = zip(*names["sines"](50, torch.Generator().manual_seed(2)), strict=True)
    return float(np.mean([names["task_loss"].__wrapped__(model, *task).item() for task in tasks]))


@pytest.mark.nightly
def test_it_runs_and_its_numbers_are_those_of_one_process(
    definitions: dict[str, Any], tmp_path: Path
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    execute(notebook, work)

    assert stdout(cell(notebook, "who")).splitlines() == [
        f"Hello from rank {rank} of 2 | in a process of its own: True" for rank in (0, 1)
    ]

    model, losses = by_hand(definitions, 101)
    said = stdout(cell(notebook, "train"))
    steps = {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", said)}
    assert list(steps) == list(range(0, 101, 20))  # rank 0 alone speaks, and each line once
    # The means of two workers and of one are rounded otherwise, and Adam magnifies that.
    for step, loss in steps.items():
        assert loss == pytest.approx(losses[step], rel=0.1, abs=2e-3)
    assert steps[0] == pytest.approx(losses[0], abs=1e-3)
    assert re.search(r"^True \| loss at the end: ", said, re.MULTILINE)
    (at_the_end,) = map(float, re.findall(r"at the end: ([\d.]+)", said))
    assert at_the_end == pytest.approx(np.mean(losses[-10:]), rel=0.1)

    untrained, _ = by_hand(definitions, 0)
    said = stdout(cell(notebook, "test"))
    before, after = map(float, re.findall(r"(?:: |, )([\d.]+)", said))
    assert before == pytest.approx(held_out(definitions, untrained), abs=1e-3)
    assert after == pytest.approx(held_out(definitions, model), rel=0.1)
    assert after < before / 2

    width, height = drawn(cell(notebook, "curve"))
    assert width > 1.5 * height > 300

    failed = stdout(cell(notebook, "diverged"))
    assert re.search(
        r"^rank 0 on localhost: the loss is [\d.e+]+ at step (\d)\nthe step is here, too: \1$",
        failed,
        re.MULTILINE,
    )


@pytest.mark.nightly
def test_few_shot_learning_in_a_small_setting(tmp_path: Path) -> None:
    notebook = nbformat.read(FEW_SHOT, as_version=4)
    assert "SCRIPTS = None" in cell(notebook, "settings").source
    cell(notebook, "settings").source = SMALL
    execute(notebook, tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", stdout(cell(notebook, "train")))]
    assert len(losses) == 10
    assert np.mean(losses[-3:]) < np.mean(losses[:3])
    right = dict(re.findall(r"^(.*?) +([\d.]+) ± [\d.]+ %$", stdout(cell(notebook, "test")), re.MULTILINE))
    assert list(right) == ["MAML", "no training", "nearest neighbour"]
    assert all(20 < float(mean) < 100 for mean in right.values())
    assert float(right["nearest neighbour"]) > 50
    for name in ("task", "picture"):
        width, height = drawn(cell(notebook, name))
        assert width > height


@pytest.mark.parametrize("path", [NOTEBOOK, FEW_SHOT], ids=lambda path: path.stem)
def test_it_is_kept_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for each in notebook.cells:
        assert each.source.strip()
        if each.cell_type == "code":
            assert (each.outputs, each.execution_count) == ([], None)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert set(notebook.metadata.language_info) == {"name"}


class Kernel:
    """Cells, one after another, in a kernel that works in a folder."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self.manager, self.client = manager, client

    @property
    def pid(self) -> int:
        return self.manager.provisioner.pid

    def start(self, code: str) -> str:
        """Start a cell."""
        return self.client.execute(code, store_history=False)

    def finish(self, cell: str, seconds: float = 60.0) -> list[dict[str, Any]]:
        """The contents of a cell's outputs, when it has ended."""
        outputs = []
        deadline = time.monotonic() + seconds
        while True:
            message = self.client.get_iopub_msg(timeout=max(0.0, deadline - time.monotonic()))
            if message["parent_header"].get("msg_id") != cell:
                continue
            if message["msg_type"] in ("stream", "error", "execute_result"):
                outputs.append(message["content"])
            elif message["content"].get("execution_state") == "idle":
                return outputs

    def run(self, code: str) -> list[dict[str, Any]]:
        """The outputs of a cell."""
        return self.finish(self.start(code))

    def value(self, code: str) -> str:
        """The text of a cell's last line, of a cell that prints nothing."""
        (output,) = self.run(code)
        return output["data"]["text/plain"]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working folder of the kernel, and so of all that it starts."""
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def kernel(work: Path) -> Iterator[Kernel]:
    """One for all tests below, the last of which kills it: a kernel imports torch, and so does its forkserver."""
    manager, client = started(lambda: start_new_kernel(cwd=str(work)))
    try:
        yield Kernel(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    deadline = time.monotonic() + 10
    while working_in(work):
        assert time.monotonic() < deadline, working_in(work)
        time.sleep(0.01)


FAMILIES = """
import time
from pathlib import Path
from torchopt_dist.launching import Launcher
from tests.launch.families import start_a_family


def hold_on(folder):
    start_a_family(Path(folder))
    time.sleep(300)


two = Launcher(nproc_per_host=2)
"""


def test_an_interrupt_before_the_workers_are_up_ends_the_launch(kernel: Kernel, work: Path) -> None:
    assert kernel.run(FAMILIES) == []
    cell = kernel.start("two.run(hold_on, '.')")
    deadline = time.monotonic() + 20
    while len(working_in(work)) < 2:  # the forkserver has begun to import torch
        assert time.monotonic() < deadline
        time.sleep(0.001)
    kernel.manager.interrupt_kernel()
    (error,) = kernel.finish(cell)
    assert error["ename"] == "KeyboardInterrupt"
    deadline = time.monotonic() + 20
    while len(at_work_in(work)) > 1:  # the kernel
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert kernel.value("two.run(lambda: sum(range(4))).results") == "{'localhost': [6, 6]}"


def test_an_interrupt_of_the_kernel_ends_the_launch(kernel: Kernel, work: Path) -> None:
    assert kernel.run(FAMILIES) == []
    for folder in ("first", "second"):  # the second time the forkserver is up already
        (work / folder).mkdir()
        cell = kernel.start(f"two.run(hold_on, {folder!r})")
        pids = set(family_of(work / folder))
        assert len(alive(pids)) == 9  # 2 workers with 3 each, and their agent
        interrupted = time.monotonic()
        kernel.manager.interrupt_kernel()
        (error,) = kernel.finish(cell)
        assert error["ename"] == "KeyboardInterrupt"
        assert_gone(pids, 5.0 - (time.monotonic() - interrupted))
        # And the kernel is as good as before.
        assert kernel.value("two.run(lambda: sum(range(4))).results") == "{'localhost': [6, 6]}"


def test_an_exception_of_a_class_of_a_cell_is_shown_with_its_traceback_there(kernel: Kernel) -> None:
    outputs = kernel.run(
        """
import os
from torchopt_dist.launching import Launcher


class TooWarmError(Exception):
    pass


def melt(degrees):
    print("warming", degrees)
    raise TooWarmError(f"{degrees} degrees")


Launcher(nproc_per_host=1).run(melt, 42)
"""
    )
    *said, error = outputs
    assert "warming 42" in "".join(each["text"] for each in said if each["name"] == "stdout")
    assert (error["ename"], error["evalue"]) == ("TooWarmError", "42 degrees")
    shown = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(error["traceback"]))
    assert re.search(
        r"on rank 0 on localhost:\s+Traceback .*\n.*, in melt\n"
        r" +raise TooWarmError.*\n(.*\n)*?TooWarmError: 42 degrees",
        shown,
    )


def test_a_launch_in_a_thread_and_below_an_event_loop(kernel: Kernel, work: Path) -> None:
    (work / "here").mkdir()
    start = "import asyncio, os\nfrom torchopt_dist.launching import Launcher\nos.chdir('here')"
    assert kernel.run(f"{start}\none = Launcher(nproc_per_host=1)") == []
    here = repr(str(work / "here"))
    assert kernel.value("(await asyncio.to_thread(one.run, os.getcwd)).rank(0)") == here
    below = "async def below():\n    return one.run(os.getcwd).rank(0)"
    assert kernel.value(f"{below}\nawait below()") == here
    assert kernel.run("os.chdir('..')") == []


def test_a_kernel_that_is_killed_leaves_nothing(kernel: Kernel, work: Path) -> None:
    assert kernel.run(FAMILIES) == []
    (work / "killed").mkdir()
    kernel.start("two.run(hold_on, 'killed')")
    pids = [*family_of(work / "killed"), *working_in(work)]
    psutil.Process(kernel.pid).kill()
    assert_gone(pids, 5.0)
