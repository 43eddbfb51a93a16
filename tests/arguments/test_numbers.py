"""A whole number of any library is an integer; a truth value, a float and a text are none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.rows import each_row
from torchopt_dist.arguments.numbers import integer


@pytest.mark.parametrize("value", [3, np.int64(3)])
def test_an_integer_is_a_plain_one(value: Any) -> None:
    assert type(integer("n", value, 3)) is int
    assert integer("n", -value) == -3


@each_row("value", [True, 3.0, "3", None])
def test_another_kind_is_named(value: Any) -> None:
    with pytest.raises(TypeError, match=f"`n` must be an integer, got {type(value).__name__}"):
        integer("n", value)


def test_what_is_too_small_is_named() -> None:
    with pytest.raises(ValueError, match="`n` must be at least 1, got 0"):
        integer("n", 0, 1)
