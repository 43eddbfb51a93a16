"""Where the nearest peer is wrong, row by row of its table of implicit gradients, and the test that catches it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]

ROWS = {
    "cg of a scalar": "linalg/test_linalg.py::test_cg_of_a_scalar",
    "a scalar custom_root": "diff/test_implicit.py::test_second_order_of_a_scalar",
    "maxiter counts elements": "linear_solve/test_solvers.py::test_the_default_number_of_iterations_counts_elements",
    "blocks between leaves": "linear_solve/test_solvers.py::test_all_blocks_of_a_tree",
    "gradients through cg": "linalg/test_linalg.py::test_implicit_gradients_are_those_of_the_unrolled_iterations",
    "a lone later argnum": "diff/test_implicit.py::test_any_argnums_a_lone_later_one_too",
    "dict arguments": "diff/test_implicit.py::test_trees_keyword_arguments_and_aux",
    "vmap and torch.func": "diff/test_implicit.py::test_torch_func_and_vmap",
    "ns and ns_inv agree": "linalg/test_linalg.py::test_both_series_agree_to_the_last_term",
    "forward divides by sigma, and keeps its baseline": "diff/test_zero_order.py::test_the_formulas",
    "zero order is unbiased": "diff/test_zero_order.py::test_unbiased_within_its_own_spread",
    "module kwargs": "nn/test_meta_modules.py::test_zero_order_modules_take_keyword_arguments",
}


@pytest.mark.parametrize("row", ROWS)
def test_every_row_has_its_test(row):
    file, _, name = ROWS[row].partition("::")
    assert re.search(rf"^def {name}\(", (TESTS / file).read_text(), re.MULTILINE), ROWS[row]
