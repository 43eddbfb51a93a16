"""The parts of the proof on a GPU, in their order: what each runs, and in how many seconds it must have ended."""

from __future__ import annotations

from typing import NamedTuple


class Part(NamedTuple):
    """One part; ``tests`` are pytest's arguments, without any it is the program ``figures.py``."""

    name: str
    what: str
    seconds: int
    tests: tuple[str, ...] = ()
    dry: tuple[str, ...] | None = None
    """The tests where there is no GPU, if others."""
    quick: str = ""
    """With ``--quick``, which of them, as pytest's ``-k`` has it."""
    processes: int = 8
    """Of pytest-xdist, where it is there and so many cores are."""


TABLES = (
    "tests/optim/test_every_optimizer.py",
    "tests/optim/test_vmap.py",
    "tests/diff/test_adjoints.py",
    "tests/ops/test_adam.py",
    "tests/ops/test_sgd.py",
    "tests/ops/test_rmsprop_derivatives.py",
    "tests/ops/test_under_torch_func.py",
)
"""Tests of the CPU that are run on the GPU as they are, by a plugin that makes it the default device."""
OF_THE_CPU = (
    "tests/diff/test_adjoints.py::test_aux_comes_back_a_step_and_random_numbers_are_seeded",
    "tests/optim/test_every_optimizer.py::test_a_gradient_of_zeros_without_memory_is_one_of_zeros",
)
"""Those among them that hold on the CPU only: there a loop without a seed draws one from the generator in question; and
torch's own SGD, beside which ours is seen, cannot add to such zeros on a GPU.
"""

PARTS = (
    Part(
        "kernels",
        "kernels against the formulas, orders 0 to 2",
        90,
        ("tests/ops/test_cuda.py", "tests/gpu/test_kernels.py"),
        (
            "tests/packaging/test_cuda_build.py::test_both_libraries_are_built_and_the_kernels_are_right",
            "tests/gpu/test_kernels.py",
        ),
        "not both_libraries",  # which are built in another test's time
    ),
    Part(
        "tables",
        "optimizers and adjoints",
        120,
        (
            *("-p", "tests.gpu.on_device", "tests/gpu/test_adjoints.py", *TABLES),
            *(word for test in OF_THE_CPU for word in ("--deselect", test)),
        ),
        ("tests/gpu/test_adjoints.py",),
        "float32 or not gradients_are",
    ),
    Part(
        "calls",
        "calls, mirrors, ranks, checkpoints, pages",
        120,
        ("tests/gpu/test_calls.py", "tests/gpu/test_pages.py"),
        quick="not rpc and not programs_of_the_pages and not mirror and not launch",
        processes=4,
    ),
    Part(
        "compiled",
        "compiled programs, captures, memory",
        150,
        ("tests/gpu/test_compiled.py", "tests/gpu/test_capture.py"),
        quick="(loop and replayed) or (task and True-reduce) or forbids[adam] or forbidden_is_found",
        processes=6,
    ),
    Part(
        "again",
        "parts computed again, attention, equilibrium layers, scores of examples",
        90,
        ("tests/gpu/test_computed_again.py",),
        quick="in_tiles or remat or micro or scores",
        processes=4,
    ),
    Part("figures", "figures", 240),
)
