"""Where the nearest peer is wrong, row by row of four tables, and the test of ours that would have caught it."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent

ROWS = {
    "distribution": {
        "uneven splits": (
            "distributed/test_dim_partitioner.py::test_shares_cover_all_in_order_and_differ_by_one_at_most"
        ),
        "mean of uneven splits": (
            "distributed/test_reduce.py::test_on_four_workers_the_mean_of_seven_is_three"
        ),
        "a broadcast argument travels once": (
            "distributed/serialization/test_pickling.py::test_what_is_shared_travels_once"
        ),
        "the own share is not copied": (
            "distributed/calls/test_own_share.py::test_large_tensors_are_not_copied"
        ),
        "parameters get gradients without a clone": (
            "distributed/calls/test_gradients.py::test_plain_backward_fills_grad"
        ),
        "what cannot be connected is an error": (
            "distributed/calls/test_gradient_errors.py::test_what_cannot_be_connected_is_an_error"
        ),
        "any callable": "distributed/calls/test_calls.py::test_any_callable_runs_on_a_worker",
        "the decorated function": (
            "distributed/test_parallelize.py::test_the_decorated_function_is_not_touched"
        ),
        "trees are reduced": "distributed/test_reduce.py::test_trees_are_reduced_leaf_by_leaf",
        "an empty batch": (
            "distributed/test_partition_trees.py::test_arguments_that_cannot_be_split_are_named"
        ),
        "what is whole": (
            "distributed/test_partition_trees.py"
            "::test_modules_parameters_scalars_and_marked_tensors_are_whole"
        ),
        "partitioners are picklable": "distributed/test_dim_partitioner.py::test_partitioners_can_be_copied",
        "the caller's state": "distributed/calls/test_calls.py::test_the_caller_s_state_travels",
        "exceptions keep their type": (
            "distributed/calls/test_errors.py::test_each_kind_arrives_from_a_worker"
        ),
        "no time-out unless asked": (
            "distributed/life/test_init_rpc_options.py::test_calls_have_no_timeout_by_default"
        ),
        "repeated grad and backward": (
            "distributed/test_autograd.py::test_repeated_calls_in_one_context_are_exact"
        ),
        "the environment is read when asked": (
            "distributed/test_world.py::test_the_environment_is_read_when_asked"
        ),
        "worker_init_fn raises on one rank": (
            "distributed/life/test_ends.py::test_worker_init_fn_that_raises_on_one_rank_ends_all"
        ),
        "auto_init_rpc inside main": (
            "distributed/life/test_init_rpc.py::test_auto_init_rpc_inside_main_uses_the_group_that_is_there"
        ),
        "auto_init_rpc again": (
            "distributed/life/test_init_rpc.py::test_a_second_group_is_made_after_the_first_has_ended"
        ),
        "second order": "distributed/calls/test_gradients.py::test_first_and_second_order_pass_gradcheck",
    },
    "optimizers": {
        "p.grad is untouched": (
            "optim/test_every_optimizer.py::test_gradients_are_only_read_and_memory_holds_no_graph"
        ),
        "double precision is exact": (
            "optim/test_particulars.py::test_double_precision_is_exact_in_the_first_step"
        ),
        "all state is in the state": "transform/test_trace.py::test_all_memory_is_in_the_state",
        "a resumed run": "optim/test_states.py::test_a_resumed_run_equals_an_unbroken_one_bit_for_bit",
        "a None gradient": (
            "optim/test_every_optimizer.py::test_a_parameter_without_gradient_is_skipped_as_in_torch"
        ),
        "AdamW mask and groups": "optim/test_particulars.py::test_adamw_mask_and_groups",
        "torch's argument names": (
            "optim/test_signatures.py::test_the_three_faces_share_one_signature_and_one_text"
        ),
        "all travel": "optim/test_states.py::test_transformations_and_optimizers_travel",
        "func optimizers travel": "optim/test_functional_optimizer.py::test_copies_go_on_alike_and_apart",
        "schedulers": "optim/test_every_optimizer.py::test_grad_scaler_and_schedulers",
        "real torch optimizers": "optim/test_optimizer.py::test_it_is_a_torch_optimizer",
        "the graph stays flat": (
            "optim/test_meta_optimizer.py::test_the_graph_stays_flat_over_a_thousand_cut_steps"
        ),
        "and FuncOptimizer's": (
            "optim/test_functional_optimizer.py::test_the_graph_stays_flat_over_a_thousand_detached_steps"
        ),
        "frozen parameters": "optim/test_meta_optimizer.py::test_frozen_parameters_stay_and_may_be_thawed",
        "tied weights": "optim/test_meta_optimizer.py::test_tied_weights_stay_tied_and_count_once",
        "finite meta-gradients": (
            "optim/test_derivatives.py::test_meta_gradients_are_finite_where_an_inner_gradient_is_zero"
        ),
        "clip_grad_norm": (
            "transform/test_clip.py"
            "::test_the_anchor_a_norm_clipped_to_a_constant_has_no_derivative_along_the_gradient"
        ),
        "register_hook": (
            "transform/test_hook.py::test_the_anchor_tensors_that_do_not_require_grad_are_skipped"
        ),
        "compiles": "optim/test_every_optimizer.py::test_update_compiles_without_a_graph_break",
        "complex": "optim/test_every_optimizer.py::test_many_steps_equal_the_twin",
    },
    "implicit gradients": {
        "cg of a scalar": "linalg/test_linalg.py::test_cg_of_a_scalar",
        "a scalar custom_root": "diff/test_implicit.py::test_second_order_of_a_scalar",
        "maxiter counts elements": (
            "linear_solve/test_solvers.py::test_the_default_number_of_iterations_counts_elements"
        ),
        "blocks between leaves": "linear_solve/test_solvers.py::test_all_blocks_of_a_tree",
        "gradients through cg": (
            "linalg/test_linalg.py::test_implicit_gradients_are_those_of_the_unrolled_iterations"
        ),
        "a lone later argnum": "diff/test_implicit.py::test_any_argnums_a_lone_later_one_too",
        "dict arguments": "diff/test_implicit.py::test_trees_keyword_arguments_and_aux",
        "vmap and torch.func": "diff/test_implicit.py::test_torch_func_and_vmap",
        "ns and ns_inv agree": "linalg/test_linalg.py::test_both_series_agree_to_the_last_term",
        "forward divides by sigma, and keeps its baseline": "diff/test_zero_order.py::test_the_formulas",
        "zero order is unbiased": "diff/test_zero_order.py::test_unbiased_within_its_own_spread",
        "module kwargs": "nn/test_meta_modules.py::test_zero_order_modules_take_keyword_arguments",
    },
    "fused steps": {
        "availability tells the truth": "ops/test_library.py::test_torchopts_question_gets_a_true_answer",
        "second order": "ops/test_adam.py::test_derivatives_of_the_one_node",
        "any strides": "ops/test_adam.py::test_an_expanded_and_a_transposed_gradient_are_read_as_they_are",
        "a mismatch is a clear error": (
            "ops/test_bad_lists.py::test_bad_lists_are_named_and_nothing_is_written"
        ),
        "eps_root, gradients near eps": "ops/test_backward.py::test_adam_backward_at_the_edges_is_autograd",
        "mu is 0": (
            "ops/test_adam.py::test_where_the_gradient_has_always_been_zero_the_derivative_is_the_limit"
        ),
        "every element, every n": "ops/test_kernels.py::test_fuzz_against_the_formula",
        "on CUDA every element, every n": "ops/test_cuda.py::test_every_element_is_written_at_every_length",
        "on CUDA a zero leaves no neighbour out": (
            "ops/test_cuda.py::test_zeros_in_the_averages_leave_no_neighbour_out"
        ),
        "half and bfloat16, no sync": "ops/test_cuda.py::test_fuzz_against_the_formula",
        "the tensors' device": "ops/test_cuda.py::test_the_tensors_device_is_used_and_the_current_one_kept",
        "the current stream": "ops/test_cuda.py::test_the_current_stream_is_used",
        "empty tensors": "ops/test_cuda.py::test_nothing_to_do_launches_nothing",
        "vmap and torch.func": "optim/test_derivatives.py::test_vmap_and_func_grad",
    },
}


def test_every_row_has_its_test() -> None:
    for rows in ROWS.values():
        for row, test in rows.items():
            file, _, name = test.partition("::")
            assert re.search(rf"^def {name}\(", (TESTS / file).read_text(), re.MULTILINE), f"{row}: {test}"
