"""Where the nearest peer is wrong, row by row of its "Accelerated (fused) op" table, and the test that catches it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent

ROWS = {
    "availability tells the truth": ("test_library.py", "test_torchopts_question_gets_a_true_answer"),
    "second order": ("test_adam.py", "test_derivatives_of_the_one_node"),
    "any strides": ("test_adam.py", "test_an_expanded_and_a_transposed_gradient_are_read_as_they_are"),
    "a mismatch is a clear error": ("test_bad_lists.py", "test_bad_lists_are_named_and_nothing_is_written"),
    "eps_root, gradients near eps": ("test_backward.py", "test_adam_backward_at_the_edges_is_autograd"),
    "mu is 0": ("test_adam.py", "test_where_the_gradient_has_always_been_zero_the_derivative_is_the_limit"),
    "every element, every n": ("test_kernels.py", "test_fuzz_against_the_formula"),
    "vmap and torch.func": ("../optim/test_derivatives.py", "test_vmap_and_func_grad"),
}


@pytest.mark.parametrize("row", ROWS)
def test_every_row_has_its_test(row):
    file, name = ROWS[row]
    assert re.search(rf"^def {name}\(", (HERE / file).read_text(), re.MULTILINE), ROWS[row]
