"""The main job, started as its docstring says, for a few meta-steps."""

from __future__ import annotations

import csv
import importlib.util
import re
import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image

import torchopt_dist as todist
from tests.examples.running import run_python
from tests.processes import World, finish, free_port, start_torchrun, torchrun

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "maml_digits.py"
SHORT = (
    *("--meta-steps", 8, "--inner-steps", 3, "--tasks", 5, "--test-tasks", 9, "--eval-every", 4),
    *("--no-baselines", "--double"),
)


def run_alone(*arguments: object) -> str:
    return run_python(EXAMPLE, *arguments)


def run_torchrun(*arguments: object) -> str:
    return torchrun("--standalone", "--nproc_per_node=2", EXAMPLE, *arguments)


def rows(path: Path) -> list[dict[str, float]]:
    with path.open() as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("maml_digits", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The files of a short run in one process, without their endings, and what it printed."""
    path = tmp_path_factory.mktemp("run") / "new" / "alone"
    files = ("--output", path.with_suffix(".png"), "--csv", path.with_suffix(".csv"), "--checkpoint", path)
    return path, run_alone(*SHORT, *files)


def test_help_names_every_argument_and_its_default() -> None:
    text = run_python(EXAMPLE, "--help")
    for name in ("ways", "shots", "tasks", "meta-steps", "inner-lr", "seed", "omniglot", "output"):
        assert f"--{name}" in text
    assert "support images a class (default: 5)" in text


def test_one_and_two_workers_draw_the_same_curve(alone: tuple[Path, str], tmp_path: Path) -> None:
    pair = tmp_path / "new" / "pair"
    files = ("--output", pair.with_suffix(".png"), "--csv", pair.with_suffix(".csv"))
    runs = ((*alone, "1 worker(s)"), (pair, run_torchrun(*SHORT, *files), "2 worker(s)"))
    for path, output, workers in runs:
        assert workers in output
        for step in (0, 4, 8):
            assert output.count(f"meta-step {step:4d}: held-out accuracy") == 1  # rank 0 alone speaks
        assert "before adaptation" in output
        assert "meta-training:" not in output  # no progress bar where nobody looks
        with Image.open(path.with_suffix(".png")) as image:
            assert image.format == "PNG"
            assert np.asarray(image.convert("L")).std() > 10  # something is drawn
    one, two = (rows(path.with_suffix(".csv")) for path, _, _ in runs)
    assert [row["meta_step"] for row in one] == list(range(9))
    assert [step for step, row in enumerate(one) if "held_out_loss" in row] == [0, 4, 8]
    for here, there in zip(one, two, strict=True):
        assert here == pytest.approx(there, rel=1e-2)
    assert one[1] == pytest.approx(two[1], rel=1e-6)  # Adam has not magnified any rounding yet
    for step in (0, 8):
        assert one[step]["held_out_accuracy_before"] == pytest.approx(1 / 5, abs=0.1)
    assert one[8]["held_out_accuracy_after"] > one[0]["held_out_accuracy_after"] + 0.05


def test_a_run_that_was_cut_off_goes_on_with_the_same_curve(alone: tuple[Path, str], tmp_path: Path) -> None:
    undisturbed, _ = alone
    middle, _ = sorted(undisturbed.iterdir())
    shutil.copy(middle, tmp_path)  # as a crash after the fourth of eight steps leaves the folder
    files = ("--output", tmp_path / "curve.png", "--csv", tmp_path / "curve.csv", "--checkpoint", tmp_path)
    output = run_alone(*SHORT, *files)
    assert "4 meta-steps" in output
    assert "meta-step    0" not in output
    assert rows(tmp_path / "curve.csv") == rows(undisturbed.with_suffix(".csv"))


def curves(folder: Path) -> None:
    """On each rank of a group: train twice, undisturbed and not."""
    module = load()
    sys.modules[module.__name__] = module  # where the workers look for its functions
    todist.barrier()
    parser = module.build_parser()
    written: list[dict[str, float]] = []

    def write(step: int, numbers: Mapping[str, float]) -> None:
        written.append({"meta_step": step, **numbers})

    for name, chaos in (("undisturbed", ""), ("chaos", "--chaos=0.1")):
        files = ("--output", folder / f"{name}.png", "--csv", folder / f"{name}.csv")
        short = (
            "--meta-steps=3",
            "--tasks=4",
            "--test-tasks=3",
            "--eval-every=3",
            "--inner-steps=2",
            "--no-baselines",
        )
        written.clear()
        module.train(parser.parse_args([str(each) for each in (*short, *files, chaos) if each]), write)
        if todist.get_rank() == 0:  # all but row 0, which is measured before the first step
            assert rows(folder / f"{name}.csv")[1:] == written


def test_workers_that_are_killed_change_no_point_of_the_curve(world: type[World], tmp_path: Path) -> None:
    endings = world(3).endings(curves, tmp_path, worker_init_fn=one_thread, on_loss="continue")
    assert endings[0].error is None
    assert sorted(ending.exitcode or 0 for ending in endings) == [-signal.SIGKILL, 0, 0]
    assert (tmp_path / "chaos.csv").read_text() == (tmp_path / "undisturbed.csv").read_text()


def one_thread() -> None:
    torch.set_num_threads(1)


def test_omniglot_is_read_from_disk(tmp_path: Path) -> None:
    noise = np.random.default_rng(0)
    for character in ("images_background/Latin/character01", "images_evaluation/Greek/character07"):
        folder = tmp_path / character
        folder.mkdir(parents=True)
        for drawing in range(3):
            image = Image.fromarray(noise.integers(0, 2, (105, 105), dtype=np.uint8) * 255)
            image.convert("1").save(folder / f"0001_{drawing:02d}.png")
    task = ("--ways", 4, "--shots", 1, "--queries", 2, "--tasks", 2, "--meta-steps", 1, "--test-tasks", 1)
    output = run_alone("--omniglot", tmp_path, "--output", tmp_path / "curve.png", *task)
    assert "times as fast" not in output  # there is one worker
    for baseline in ("random weights, adapted", "ordinary training, adapted"):
        assert output.count(f"{baseline}: held-out") == 1
    assert "meta-step    1: held-out accuracy" in output
    assert (tmp_path / "curve.png").stat().st_size > 0


def test_omniglot_gives_ink_on_paper_in_four_rotations(example: ModuleType, tmp_path: Path) -> None:
    for part in ("images_background", "images_evaluation"):
        folder = tmp_path / part / "Latin" / "character01"
        folder.mkdir(parents=True)
        pixels = np.full((105, 105), 255, dtype=np.uint8)
        pixels[:50] = 0  # ink above
        Image.fromarray(pixels).save(folder / "0001_01.png")
    classes, held_out = example.omniglot_classes(tmp_path)
    assert len(classes) == len(held_out) == 4
    upright, left, upside_down, _ = (images[0, 0] for images in classes)
    assert upright.shape == (28, 28)
    assert upright[:12].min() > 0.99
    assert upright[16:].max() < 0.01
    torch.testing.assert_close(upside_down, upright.flip(0, 1))
    torch.testing.assert_close(left, upright.rot90())


def test_tasks_hold_out_digits_and_query_images(example: ModuleType) -> None:
    classes, held_out = example.digit_classes()
    assert (len(classes), len(held_out)) == (28, 12)
    assert sum(map(len, classes + held_out)) == 4 * 1797
    # Each image of each class gets a number of its own, so that it can be recognized in a task.
    numbered = [torch.arange(20.0).reshape(20, 1, 1, 1) + 100 * index for index in range(12)]
    args = example.build_parser().parse_args(["--shots=4"])
    tasks = example.tasks_of(numbered, args, seed=0).batch(range(7))
    assert [tuple(tensor.shape) for tensor in tasks] == [(7, 20, 1, 1, 1), (7, 20), (7, 75, 1, 1, 1), (7, 75)]
    for task in zip(*tasks, strict=True):
        support_x, support_y, query_x, query_y = (tensor.flatten().tolist() for tensor in task)
        assert len({*support_x, *query_x}) == 5 * (4 + 15)
        class_of = {x // 100: y for x, y in zip(support_x, support_y, strict=True)}
        assert sorted(class_of.values()) == list(range(5))
        assert all(class_of[x // 100] == y for x, y in zip(query_x, query_y, strict=True))


def test_two_nodes(tmp_path: Path) -> None:
    port = free_port()
    jobs = [
        start_torchrun(
            *("--nproc_per_node=2", "--nnodes=2", "--node_rank", node),
            *("--master_addr", "127.0.0.1", "--master_port", port),
            *(EXAMPLE, "--meta-steps", 1, "--inner-steps", 1, "--tasks", 4, "--test-tasks", 4),
            *("--output", tmp_path / "curve.png"),
        )
        for node in (0, 1)
    ]
    outputs = finish(*jobs)
    assert "4 worker(s)" in outputs[0]
    assert "worker(s)" not in outputs[1]
    assert re.search(r"a meta-step takes \S+ s on one worker and \S+ s on 4: \S+ times as fast", outputs[0])


def test_a_folder_without_omniglot_is_named(example: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"--omniglot: no Alphabet/characterNN/.* in {tmp_path}"):
        example.omniglot_classes(tmp_path)


WITHOUT_KERNELS = """
import runpy, sys
from torchopt_dist.ops import library
library._KERNELS = frozenset()
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_the_curve_is_the_same_without_the_kernels(alone: tuple[Path, str], tmp_path: Path) -> None:
    files = ("--output", tmp_path / "without.png", "--csv", tmp_path / "without.csv")
    run_python("-c", WITHOUT_KERNELS, EXAMPLE, *SHORT, *files)
    with_kernels, without = rows(alone[0].with_suffix(".csv")), rows(tmp_path / "without.csv")
    assert len(with_kernels) == len(without) > 1
    for one, other in zip(with_kernels, without, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-3)
