"""Where the nearest peer is wrong, row by row of its "Distribution" table, and the test that would have caught it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent

ROWS = {
    "uneven splits": "test_dim_partitioner.py::test_shares_cover_all_in_order_and_differ_by_one_at_most",
    "mean of uneven splits": "test_reduce.py::test_on_four_workers_the_mean_of_seven_is_three",
    "a broadcast argument travels once": "serialization/test_pickling.py::test_what_is_shared_travels_once",
    "the own share is not copied": "calls/test_own_share.py::test_large_tensors_are_not_copied",
    "parameters get gradients without a clone": "calls/test_gradients.py::test_plain_backward_fills_grad",
    "what cannot be connected is an error": "calls/test_gradient_errors.py::test_what_cannot_be_connected_is_an_error",
    "any callable": "calls/test_calls.py::test_any_callable_runs_on_a_worker",
    "the decorated function": "test_parallelize.py::test_the_decorated_function_is_not_touched",
    "trees are reduced": "test_reduce.py::test_trees_are_reduced_leaf_by_leaf",
    "an empty batch": "test_partition_trees.py::test_arguments_that_cannot_be_split_are_named",
    "what is whole": "test_partition_trees.py::test_modules_parameters_scalars_and_marked_tensors_are_whole",
    "partitioners are picklable": "test_dim_partitioner.py::test_partitioners_can_be_copied",
    "the caller's state": "calls/test_calls.py::test_the_caller_s_state_travels",
    "exceptions keep their type": "calls/test_errors.py::test_each_kind_arrives_from_a_worker",
    "no time-out unless asked": "life/test_init_rpc_options.py::test_calls_have_no_timeout_by_default",
    "repeated grad and backward": "test_autograd.py::test_repeated_calls_in_one_context_are_exact",
    "the environment is read when asked": "test_world.py::test_the_environment_is_read_when_asked",
    "worker_init_fn raises on one rank": "life/test_ends.py::test_worker_init_fn_that_raises_on_one_rank_ends_all",
    "auto_init_rpc inside main": "life/test_init_rpc.py::test_auto_init_rpc_inside_main_uses_the_group_that_is_there",
    "auto_init_rpc again": "life/test_init_rpc.py::test_a_second_group_is_made_after_the_first_has_ended",
    "second order": "calls/test_gradients.py::test_first_and_second_order_pass_gradcheck",
}


@pytest.mark.parametrize("row", ROWS)
def test_every_row_has_its_test(row):
    file, _, name = ROWS[row].partition("::")
    assert re.search(rf"^def {name}\(", (HERE / file).read_text(), re.MULTILINE), ROWS[row]
