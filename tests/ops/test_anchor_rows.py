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
    "on CUDA every element, every n": ("test_cuda.py", "test_every_element_is_written_at_every_length"),
    "on CUDA a zero leaves no neighbour out": (
        "test_cuda.py",
        "test_zeros_in_the_averages_leave_no_neighbour_out",
    ),
    "half and bfloat16, no sync": ("test_cuda.py", "test_fuzz_against_the_formula"),
    "the tensors' device": ("test_cuda.py", "test_the_tensors_device_is_used_and_the_current_one_kept"),
    "the current stream": ("test_cuda.py", "test_the_current_stream_is_used"),
    "empty tensors": ("test_cuda.py", "test_nothing_to_do_launches_nothing"),
    "vmap and torch.func": ("../optim/test_derivatives.py", "test_vmap_and_func_grad"),
}


@pytest.mark.parametrize("row", ROWS)
def test_every_row_has_its_test(row):
    file, name = ROWS[row]
    assert re.search(rf"^def {name}\(", (HERE / file).read_text(), re.MULTILINE), ROWS[row]
