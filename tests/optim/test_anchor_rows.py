"""Where the nearest peer is wrong, row by row of its "Optimizers" table, and the test that would have caught it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

ROWS = {
    "p.grad is untouched": (
        "optim/test_every_optimizer.py",
        "test_gradients_are_only_read_and_memory_holds_no_graph",
    ),
    "double precision is exact": (
        "optim/test_particulars.py",
        "test_double_precision_is_exact_in_the_first_step",
    ),
    "all state is in the state": ("transform/test_trace.py", "test_all_memory_is_in_the_state"),
    "a resumed run": (
        "optim/test_states.py",
        "test_a_resumed_run_equals_an_unbroken_one_bit_for_bit",
    ),
    "a None gradient": (
        "optim/test_every_optimizer.py",
        "test_a_parameter_without_gradient_is_skipped_as_in_torch",
    ),
    "AdamW mask and groups": ("optim/test_particulars.py", "test_adamw_mask_and_groups"),
    "torch's argument names": (
        "optim/test_signatures.py",
        "test_the_three_faces_share_one_signature_and_one_text",
    ),
    "all travel": ("optim/test_states.py", "test_transformations_and_optimizers_travel"),
    "func optimizers travel": ("optim/test_functional_optimizer.py", "test_copies_go_on_alike_and_apart"),
    "schedulers": ("optim/test_every_optimizer.py", "test_grad_scaler_and_schedulers"),
    "real torch optimizers": ("optim/test_optimizer.py", "test_it_is_a_torch_optimizer"),
    "the graph stays flat": (
        "optim/test_meta_optimizer.py",
        "test_the_graph_stays_flat_over_a_thousand_cut_steps",
    ),
    "and FuncOptimizer's": (
        "optim/test_functional_optimizer.py",
        "test_the_graph_stays_flat_over_a_thousand_detached_steps",
    ),
    "frozen parameters": ("optim/test_meta_optimizer.py", "test_frozen_parameters_stay_and_may_be_thawed"),
    "tied weights": ("optim/test_meta_optimizer.py", "test_tied_weights_stay_tied_and_count_once"),
    "finite meta-gradients": (
        "optim/test_derivatives.py",
        "test_meta_gradients_are_finite_where_an_inner_gradient_is_zero",
    ),
    "clip_grad_norm": (
        "transform/test_clip.py",
        "test_the_anchor_a_norm_clipped_to_a_constant_has_no_derivative_along_the_gradient",
    ),
    "register_hook": (
        "transform/test_hook.py",
        "test_the_anchor_tensors_that_do_not_require_grad_are_skipped",
    ),
    "compiles": ("optim/test_every_optimizer.py", "test_update_compiles_without_a_graph_break"),
    "complex": ("optim/test_every_optimizer.py", "test_many_steps_equal_the_twin"),
}


@pytest.mark.parametrize("row", ROWS)
def test_every_row_has_its_test(row):
    file, name = ROWS[row]
    assert re.search(rf"^def {name}\(", (TESTS / file).read_text(), re.MULTILINE), ROWS[row]
