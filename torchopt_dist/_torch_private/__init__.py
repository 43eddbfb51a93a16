"""Private names of torch and of the standard library → functions that also work where such a name is missing.

No file outside of this folder uses a private name. There is one file a subject, and all take functions from here. Each
function looks its name up when it is called, and says what is lost where the name is missing; the tests in
``tests/torch_private`` hide each name and test that.
"""

from __future__ import annotations

from torchopt_dist._torch_private.backward_hooks import let_graphs_drop
from torchopt_dist._torch_private.compiler import (
    gradients_are_traced,
    traced_leaf,
    traced_samples,
    tracing_gradients,
)
from torchopt_dist._torch_private.engine import (
    advance_sequence_numbers,
    asking_thread,
    engine_captures_leaf,
    engine_keeps_graph,
    engine_needs_node,
    engine_run,
    evaluating_node,
    grad_of_loss,
    next_sequence_number,
    sequence_numbers,
    set_sequence_number,
)
from torchopt_dist._torch_private.graph import (
    apply_function,
    bytes_of_results,
    ends_gradients_graph,
    forward_mode_is_active,
    has_hooks,
    is_batched_gradient,
    is_used_up,
    memory_is_shared,
    tensor_version,
    tensors_entering,
)
from torchopt_dist._torch_private.interpreter import (
    exception_in,
    finish_interpreter,
    frame_of,
    interpreter_flags,
    leave_finalizers,
    profiler_is_on,
)
from torchopt_dist._torch_private.modules import (
    attributes_of,
    buffers_of,
    children_of,
    note_attributes,
    parameters_of,
    set_parameters,
)
from torchopt_dist._torch_private.ops import (
    autocast_is_on,
    fused_step,
    has_kernel,
    left_to_python,
)
from torchopt_dist._torch_private.rpc import (
    init_distributed_autograd,
    nccl_group,
    set_cpp_log_level,
    set_default_rpc_timeout,
    set_failure,
    tensorpipe_options_with_sockets,
    time_out_of,
)
from torchopt_dist._torch_private.runs import forget_failed_runs, held_by_run
from torchopt_dist._torch_private.transforms import (
    batch_of,
    batched,
    entrances_for_tensors,
    grads_inside_transforms,
    is_functorch_tensor,
    outside_of_transforms,
    tensor_at_level,
    transform_level,
    transforms_are_active,
    transforms_are_only,
    vmap_randomness,
    vmaps,
)

__all__ = [
    "advance_sequence_numbers",
    "apply_function",
    "asking_thread",
    "attributes_of",
    "autocast_is_on",
    "batch_of",
    "batched",
    "buffers_of",
    "bytes_of_results",
    "children_of",
    "ends_gradients_graph",
    "engine_captures_leaf",
    "engine_keeps_graph",
    "engine_needs_node",
    "engine_run",
    "entrances_for_tensors",
    "evaluating_node",
    "exception_in",
    "finish_interpreter",
    "forget_failed_runs",
    "forward_mode_is_active",
    "frame_of",
    "fused_step",
    "grad_of_loss",
    "gradients_are_traced",
    "grads_inside_transforms",
    "has_hooks",
    "has_kernel",
    "held_by_run",
    "init_distributed_autograd",
    "interpreter_flags",
    "is_batched_gradient",
    "is_functorch_tensor",
    "is_used_up",
    "leave_finalizers",
    "left_to_python",
    "let_graphs_drop",
    "memory_is_shared",
    "nccl_group",
    "next_sequence_number",
    "note_attributes",
    "outside_of_transforms",
    "parameters_of",
    "profiler_is_on",
    "sequence_numbers",
    "set_cpp_log_level",
    "set_default_rpc_timeout",
    "set_failure",
    "set_parameters",
    "set_sequence_number",
    "tensor_at_level",
    "tensor_version",
    "tensorpipe_options_with_sockets",
    "tensors_entering",
    "time_out_of",
    "traced_leaf",
    "traced_samples",
    "tracing_gradients",
    "transform_level",
    "transforms_are_active",
    "transforms_are_only",
    "vmap_randomness",
    "vmaps",
]
