"""What a script sets for its whole process holds in workers, whose random numbers are their own."""

from __future__ import annotations

import logging
import random
import sys
import warnings

import numpy as np
import pytest
import torch

from torchopt_dist.launching import Launcher
from torchopt_dist.launching._settings import Settings

TWO = Launcher(nproc_per_host=2, log_dir=None)


@pytest.fixture
def script():
    """A function that sets what a script may set, until the test ends."""
    root, precision = logging.getLogger(), torch.get_float32_matmul_precision()
    level, handlers = root.level, root.handlers.copy()

    def run():
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_float32_matmul_precision("medium")
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(levelname)s of the script: %(message)s"))
        root.setLevel(logging.INFO)
        root.addHandler(handler)
        logging.getLogger("tests.quiet").setLevel(logging.ERROR)
        warnings.filterwarnings("error", "what the script forbids", UserWarning)

    with warnings.catch_warnings():
        yield run
    logging.getLogger("tests.quiet").setLevel(logging.NOTSET)
    root.handlers[:] = handlers
    root.setLevel(level)
    torch.set_float32_matmul_precision(precision)
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


def test_what_a_script_sets_holds_in_its_workers(script, capfd):
    script()

    def work():
        logging.info("a line")
        logging.getLogger("tests.quiet").warning("a line of another logger")
        try:
            warnings.warn("what the script forbids", UserWarning, stacklevel=1)
        except UserWarning:
            forbidden = True
        return (
            torch.ones(()).dtype,
            torch.ones(()).device.type,
            torch.get_float32_matmul_precision(),
            forbidden,
        )

    assert TWO.run(work).rank(1) == (torch.float64, "meta", "medium", True)
    assert "INFO of the script: a line\n" in (written := capfd.readouterr().err)
    assert "another logger" not in written


def test_settings_that_are_applied_are_captured_again(script):
    script()
    before = Settings.capture()
    before.apply()
    logging.getLogger().removeHandler(logging.getLogger().handlers[-1])
    assert Settings.capture() == before


def test_random_numbers_differ_among_workers_and_launches():
    torch.manual_seed(0)

    def draw():
        return torch.rand(()).item(), float(np.random.rand()), random.random()

    drawn = [TWO.run(draw).rank(rank) for _ in range(2) for rank in range(2)]
    assert all(len(set(numbers)) == 4 for numbers in zip(*drawn, strict=True))
