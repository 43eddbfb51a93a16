"""Importing the package: the garbage collector rests meanwhile, and is afterwards as it was before."""

from __future__ import annotations

import gc
import runpy

import pytest

from torchopt_dist import _collector


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_it_was(enabled: bool) -> None:
    assert gc.isenabled(), "the package, which this process has imported, has not turned it on again"
    try:
        if not enabled:
            gc.disable()
        imported = runpy.run_path(_collector.__file__)
        assert not gc.isenabled()
        imported["resume"]()
        assert gc.isenabled() is enabled
    finally:
        gc.enable()
