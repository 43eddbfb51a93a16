"""Private names of torch and of the standard library → functions that also work where such a name is missing.

No other file uses a private name. Each function looks its name up when it is called, and says what is lost where the
name is missing; ``tests/test_torch_private.py`` hides each name and tests that.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import math
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from multiprocessing import util
from operator import methodcaller
from pathlib import Path
from types import FrameType
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed import rpc
from torch.overrides import has_torch_function

from torchopt_dist.typing import OptionalTensor, TensorContainer

__all__ = [
    "advance_sequence_numbers",
    "apply_function",
    "asking_thread",
    "autocast_is_on",
    "batch_of",
    "batched",
    "buffers_of",
    "bytes_of_results",
    "children_of",
    "engine_captures_leaf",
    "engine_keeps_graph",
    "engine_needs_node",
    "engine_run",
    "evaluating_node",
    "exception_in",
    "finish_interpreter",
    "forward_mode_is_active",
    "frame_of",
    "fused_step",
    "grad_of_loss",
    "has_hooks",
    "has_kernel",
    "init_distributed_autograd",
    "interpreter_flags",
    "is_batched_gradient",
    "is_functorch_tensor",
    "leave_finalizers",
    "left_to_python",
    "memory_is_shared",
    "next_sequence_number",
    "outside_of_transforms",
    "parameters_of",
    "profiler_is_on",
    "saved_tensors_are_packed",
    "sequence_numbers",
    "set_cpp_log_level",
    "set_default_rpc_timeout",
    "set_parameters",
    "set_sequence_number",
    "tensor_at_level",
    "tensor_version",
    "tensorpipe_options_with_sockets",
    "transform_level",
    "transforms_are_active",
    "transforms_are_only",
    "vmap_randomness",
    "vmaps",
]

P = ParamSpec("P")
R = TypeVar("R")
CPP_LIBRARY = "libc10.dylib" if sys.platform == "darwin" else "libc10.so"


def _find(path: str) -> Any:
    """The attribute of ``torch`` at a dotted path; ``None`` where a part of the path is missing."""
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


# Autograd.


def autocast_is_on() -> bool:
    """Whether autocast is on for any type of device.

    Without the name the CPU and GPUs are asked one by one.
    """
    is_on = getattr(torch._C, "_is_any_autocast_enabled", None)
    if is_on is None:
        return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    return bool(is_on())


def set_sequence_number(tensor: Tensor, number: int) -> None:
    """Set the priority of the node that made ``tensor``: the engine runs the ready node with the highest number first.

    Without the name nodes run in torch's own order: gradients stay the same, and workers overlap less in backward.
    """
    set_number = getattr(tensor.grad_fn, "_set_sequence_nr", None)
    if set_number is not None:
        set_number(number)


def next_sequence_number() -> int:
    """The number that this thread's next node gets; each thread counts for itself.

    Without the name the answer is always 0.
    """
    peek = getattr(torch._C._autograd, "_get_sequence_nr", None)
    return 0 if peek is None else int(peek())


def sequence_numbers(node: Any) -> Callable[[Any], int]:
    """A function of a node like this one → its number, in the order in which its thread made its nodes.

    A leaf has the highest number. Without the name each node has that number: an inner loop by finite differences then
    counts what was computed from a meta tensor before the loop as a part of its loss.
    """
    if not hasattr(node, "_sequence_nr"):
        return lambda _: 2**64 - 1
    return methodcaller("_sequence_nr")


def advance_sequence_numbers(number: int) -> None:
    """Let this thread's next node have at least that number, as if the thread had made all nodes before, too.

    Where two nodes are ready, the engine runs the one with the higher number, and adds up gradients in that order. So
    if several threads make a graph, the last bit of a gradient depends on how many nodes each thread made before.
    Without the name it depends on that here, too.
    """
    if next_sequence_number() < number and _find("_C._autograd._get_sequence_nr") is not None:
        leaf = torch.zeros((), requires_grad=True, device="cpu")
        with torch.enable_grad():
            for _ in range(number - next_sequence_number()):
                leaf.view(())


def grad_of_loss(
    loss: Tensor,
    inputs: Sequence[Tensor],
    bar: Tensor | None = None,
    *,
    retain_graph: bool | None = None,
    create_graph: bool = False,
) -> tuple[OptionalTensor, ...]:
    """``torch.autograd.grad`` of a loss, with ``allow_unused=True``, but without looking at its arguments.

    Torch looks at them in Python, which takes longer than the gradient of a small loss. Without the name, and where a
    compiler or ``__torch_function__`` is to see the call, it is torch's own.

    Args:
        loss: a tensor.
        inputs: the tensors to differentiate with respect to, at least one.
        bar: the gradient of the loss, of its shape and dtype; 1, for a loss of one element, if not given.
        retain_graph: as torch's.
        create_graph: likewise.
    """
    run = getattr(getattr(torch.autograd.Variable, "_execution_engine", None), "run_backward", None)
    is_plain = loss.is_cpu and (bar is not None or loss.is_floating_point())
    if run is None or not is_plain or has_torch_function((loss, *inputs)) or torch.compiler.is_compiling():
        return torch.autograd.grad(
            loss, inputs, bar, retain_graph=retain_graph, create_graph=create_graph, allow_unused=True
        )
    bars = (torch.ones_like(loss, memory_format=torch.preserve_format) if bar is None else bar,)
    keep = create_graph if retain_graph is None else retain_graph
    found: tuple[OptionalTensor, ...] = run(
        (loss,), bars, keep, create_graph, tuple(inputs), allow_unreachable=True, accumulate_grad=False
    )
    return found


def engine_keeps_graph() -> bool:
    """Whether the backward that runs in this thread was asked for with ``retain_graph=True``.

    Without the name the answer is always yes: a worker then keeps a graph until the caller's part of it is gone.
    """
    keeps_graph = _find("_C._autograd._get_current_graph_task_keep_graph")
    return True if keeps_graph is None else bool(keeps_graph())


def evaluating_node() -> Any:
    """The node of the graph that torch's engine evaluates in this thread, for its hooks.

    Without the name there is none: the third derivative of a normalization is then torch's.
    """
    node = _find("_C._current_autograd_node")
    return None if node is None else node()


def bytes_of_results(node: Any) -> int:
    """How many bytes the results of a node of the graph take; views count as well.

    Without the name the answer is 0: a replayed step may then keep the graph of a gradient that is large.
    """
    found = getattr(node, "_input_metadata", ())
    return sum(math.prod(one.shape) * one.dtype.itemsize for one in found)


def engine_needs_node(node: Any) -> bool:
    """Whether the backward that runs in this thread goes on to a node, or was asked for a gradient there.

    Without the name the answer is always yes: workers then compute gradients that are not needed.
    """
    executes = _find("_C._will_engine_execute_node")
    if executes is None or node is None:
        return executes is None
    try:
        return bool(executes(node))
    except RuntimeError:  # torch does not say it of a leaf that was asked for
        return True


def engine_captures_leaf(node: Any) -> bool:
    """Whether the backward that runs in this thread is a ``torch.autograd.grad`` that was asked for this leaf.

    Without the name the answer is always no: such a gradient is then missing instead of an error.
    """
    executes = _find("_C._will_engine_execute_node")
    if executes is None or node is None:
        return False
    try:
        executes(node)
    except RuntimeError:
        return True
    return False


_THREAD = threading.local()


def asking_thread() -> object:
    """An object for this thread; in a thread of the engine, that of the thread that asked for the backward pass.

    Without the names each thread has its own: a loss that differentiates an inner loop on a GPU, where the engine uses
    another thread, then waits for its own turn to draw random numbers for as long as there is patience.
    """
    token: object = vars(_THREAD).setdefault("token", object())
    if not torch.cuda.is_initialized():
        # Without a GPU the engine uses the asking thread itself, if no more than 60 backward passes are nested.
        # What torch keeps for a thread is freed by C++ code at the thread's end, which aborts the process if the
        # interpreter is ending, too.
        return token
    core = torch._C
    try:
        if not core._is_key_in_tls("torchopt_dist"):
            # Torch 2.11 gives back a reference at the thread's end that it has not taken.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(token))
            core._stash_obj_in_tls("torchopt_dist", token)
        return core._get_obj_in_tls("torchopt_dist")
    except AttributeError:
        return token


def engine_run() -> int:
    """A number of the backward that runs in this thread, which no other backward has; -1 outside of any.

    Without the name the answer is always -1: an error of a share's backward may come after ``.grad`` has been written,
    and workers send their gradients when the backward is done.
    """
    run = _find("_C._current_graph_task_id")
    return -1 if run is None else int(run())


def tensor_version(tensor: Tensor) -> int | None:
    """How often a tensor has been changed in place.

    Without the name the answer is ``None``: changes in place between forward and backward go unnoticed.
    """
    return getattr(tensor, "_version", None)


def has_hooks(tensor: Tensor) -> bool:
    """Whether a hook is called with each gradient of a tensor.

    Without the name the answer is always yes: differences of gradients are taken at copies of meta tensors, which takes
    longer.
    """
    return bool(getattr(tensor, "_backward_hooks", True))


def memory_is_shared(tensor: Tensor) -> bool:
    """Whether anything else holds a tensor's memory: a view or an alias of it, a graph that has saved one, an array.

    Without the name the answer is always yes: steps of an inner loop that could be made in place make new tensors.
    """
    holders = _find("_C._storage_Use_Count")
    if holders is None:
        return True
    try:
        mine = holders(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # a sparse tensor has no memory of this kind
        return True
    return mine > _holders_of_a_new_one(holders)


def saved_tensors_are_packed() -> bool:
    """Whether ``saved_tensors_hooks`` see what a graph saves now, those of ``torch.utils.checkpoint`` for example.

    Without the name the answer is always yes: linear layers of an inner loss have torch's own nodes.
    """
    hooks = _find("_C._autograd._top_saved_tensors_default_hooks")
    return hooks is None or hooks(True) is not None


@functools.cache
def _holders_of_a_new_one(holders: Callable[[int], int]) -> int:
    """How many holders torch counts for memory that a single tensor uses, the object that is asked included."""
    one = torch.empty(1)
    return holders(one.untyped_storage()._cdata)


def forward_mode_is_active() -> bool:
    """Whether a level of forward-mode differentiation is open.

    Without the name the answer is always yes: tensors are asked for their tangents one by one, and formulas run where
    kernels could.
    """
    return getattr(forward_ad, "_current_level", 0) >= 0


def is_batched_gradient(tensor: Tensor) -> bool:
    """Whether a tensor stands for many gradients at a time, as ``is_grads_batched=True`` makes them.

    Without the name the answer is always no: such a gradient of an optimizer's step fails with an error of torch's.
    """
    is_batched = getattr(getattr(torch._C, "_functorch", None), "is_legacy_batchedtensor", None)
    return False if is_batched is None else bool(is_batched(tensor))


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply(*args)`` for an autograd function with ``setup_context``, without binding the arguments.

    Outside ``torch.func`` torch's ``apply`` takes 50 µs to bind the arguments to ``forward``'s signature, which
    positional arguments do not need. Without the names that time is spent.
    """
    unwrap = getattr(getattr(torch, "_functorch", None), "utils", None)
    unwrap = getattr(unwrap, "unwrap_dead_wrappers", None)
    if unwrap is None or transforms_are_active():
        return super(function, function).apply(*args)  # type: ignore[misc]
    return super(torch.autograd.Function, function).apply(*unwrap(args))  # type: ignore[misc]


# Ops.


def has_kernel(op: str, device_type: str) -> bool:
    """Whether an op, such as ``"todist::adam"``, has a kernel for a device type.

    Without the name the answer is always no: formulas run where kernels could.
    """
    has_kernel_for_key = _find("_C._dispatch_has_kernel_for_dispatch_key")
    try:
        return has_kernel_for_key is not None and bool(has_kernel_for_key(op, device_type.upper()))
    except RuntimeError:  # torch knows no such op
        return False


def fused_step(name: str) -> Callable[..., None] | None:
    """The op that ``torch.optim`` calls for ``fused=True``, by its optimizer: ``"adam"``, ``"adamw"``, ``"sgd"``.

    Without the name it is ``None``: formulas run, or this package's own kernels.
    """
    return cast("Callable[..., None] | None", getattr(torch, f"_fused_{name}_", None))


# Compilers.


def left_to_python(function: Callable[P, R]) -> Callable[P, R]:
    """A function that ``torch.compile`` runs as it is, and does not look into.

    As ``torch.compiler.disable``, which would import the compiler now. Without the name it is the function itself, and
    the compiler finds out slowly, function by function, what it cannot trace.
    """
    disable = _find("_compile._disable_dynamo")
    return function if disable is None else cast("Callable[P, R]", disable(function))


# Transformations of ``torch.func``.


def is_functorch_tensor(tensor: Tensor) -> bool:
    """Whether a tensor belongs to a transformation of ``torch.func``, so that it has no values of its own.

    Without the name the answer is always no: an attempt to send such a tensor fails with an error of torch's.
    """
    is_wrapped = _find("_C._functorch.is_functorch_wrapped_tensor")
    return False if is_wrapped is None else bool(is_wrapped(tensor))


def transforms_are_only(*kinds: str) -> bool:
    """Whether each active transformation of ``torch.func`` is of these kinds: ``"Grad"``, ``"Vmap"``, ``"Jvp"``.

    Without the names the answer is always no: formulas run where kernels could.
    """
    functorch = getattr(torch._C, "_functorch", None)
    stack, types = (getattr(functorch, name, None) for name in ("get_interpreter_stack", "TransformType"))
    if stack is None or types is None:
        return False
    allowed = [getattr(types, kind, None) for kind in kinds]
    return all(interpreter.key() in allowed for interpreter in stack() or ())


def outside_of_transforms() -> AbstractContextManager[object]:
    """A context in which no transformation of ``torch.func`` is active, so that ``vmap`` lets random numbers be drawn.

    Without the name it changes nothing: a remote call inside ``vmap`` fails with torch's error about random numbers.
    """
    clear = _find("_functorch.pyfunctorch.temporarily_clear_interpreter_stack")
    return nullcontext() if clear is None else clear()


def transforms_are_active() -> bool:
    """Whether a transformation of ``torch.func`` is active, such as ``vmap`` or ``grad``.

    Without the name the answer is always no: linear solvers, implicit gradients and optimizers' steps then work outside
    of them only.
    """
    are_active = getattr(torch._C, "_are_functorch_transforms_active", None)
    return False if are_active is None else bool(are_active())


def transform_level() -> int:
    """How many transformations of ``torch.func`` are nested here; without the name 0."""
    current_level = _find("_C._functorch.maybe_current_level")
    return 0 if current_level is None else current_level() or 0


def tensor_at_level(tensor: Tensor, level: int) -> Tensor:
    """The tensor at the outer ``level`` that a tensor of an inner transformation wraps.

    Without the names it is the tensor itself: a linear solver then does not notice that a product applies a
    transformation to a tensor that it closes over.
    """
    level_of, unwrapped = _find("_C._functorch.maybe_get_level"), _find("_C._functorch.get_unwrapped")
    if level_of is None or unwrapped is None:
        return tensor
    while level_of(tensor) > level:
        tensor = unwrapped(tensor)
    return tensor


def vmaps() -> list[tuple[int, int]]:
    """Level and size of each active ``vmap``, the outermost first; only those inside all other transformations.

    Without the names there are none: a ``MetaOptimizer`` inside ``vmap`` then says that it finds no gradient.
    """
    functorch = _find("_C._functorch")
    names = ("get_interpreter_stack", "TransformType", "CVmapInterpreterPtr")
    stack, types, as_vmap = (getattr(functorch, name, None) for name in names)
    if stack is None or types is None or as_vmap is None:
        return []
    found: list[tuple[int, int]] = []
    for interpreter in reversed(stack() or ()):
        if interpreter.key() != types.Vmap:
            break
        found.append((interpreter.level(), as_vmap(interpreter).batchSize()))
    return found[::-1]


def vmap_randomness() -> list[str] | None:
    """The argument ``randomness`` of each ``vmap`` of :func:`vmaps`.

    The answer is ``None`` without the name, or without that of :func:`outside_of_transforms`: inner loops inside
    ``vmap`` then record all steps instead of replaying them.
    """
    functorch, clear = (
        _find("_C._functorch"),
        _find("_functorch.pyfunctorch.temporarily_clear_interpreter_stack"),
    )
    as_vmap = getattr(functorch, "CVmapInterpreterPtr", None)
    found = vmaps()
    if clear is None or as_vmap is None or not hasattr(as_vmap, "randomness"):
        return None
    inside = functorch.get_interpreter_stack()[-len(found) :] if found else ()
    return [as_vmap(interpreter).randomness().name.lower() for interpreter in inside]


def batch_of(tensor: Tensor, level: int) -> tuple[Tensor, int] | None:
    """The values of all samples of the ``vmap`` at ``level``, and which of their dimensions counts the samples.

    ``None`` if the tensor is the same for all samples. It is asked only where :func:`vmaps` has found a ``vmap``.
    """
    functorch = torch._C._functorch
    if not functorch.is_batchedtensor(tensor) or functorch.maybe_get_level(tensor) != level:
        return None
    return functorch.get_unwrapped(tensor), functorch.maybe_get_bdim(tensor)


def batched(values: Tensor, dim: int, level: int) -> Tensor:
    """The tensor that has one entry of ``values`` along ``dim`` for each sample: the inverse of :func:`batch_of`."""
    return torch._C._functorch._add_batch_dim(values, dim, level)


# Modules.


def parameters_of(module: nn.Module) -> TensorContainer:
    """The dictionary in which a module keeps its own parameters, sub-modules' not among them.

    A tensor with a history can be put in; assigning one to the module's attribute is refused by torch.

    Raises:
        RuntimeError: the name is missing; then no module can be cloned, recovered or stepped differentiably.
    """
    parameters: TensorContainer = _dictionary(module, "_parameters")
    return parameters


def set_parameters(module: nn.Module, parameters: TensorContainer) -> None:
    """Put another dictionary in the place of :func:`parameters_of`, and fail as it does without the name."""
    parameters_of(module)
    vars(module)["_parameters"] = parameters


def buffers_of(module: nn.Module) -> TensorContainer:
    """The dictionary in which a module keeps its own buffers; otherwise as :func:`parameters_of`."""
    buffers: TensorContainer = _dictionary(module, "_buffers")
    return buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The dictionary in which a module keeps its own sub-modules; otherwise as :func:`parameters_of`."""
    children: dict[str, nn.Module | None] = _dictionary(module, "_modules")
    return children


def _dictionary(module: nn.Module, name: str) -> Any:
    try:
        return getattr(module, name)
    except AttributeError:
        raise RuntimeError(
            f"torchopt_dist needs the attribute `{name}` of torch.nn.Module, which a {type(module).__name__} does not "
            f"have in torch {torch.__version__}: use another version of torch"
        ) from None


# Remote procedure calls.


def set_cpp_log_level(level: int) -> int | None:
    """Let torch's C++ code print messages of that level and above: 0 information, 1 warnings, 2 errors.

    Returns:
        The level before; ``None`` where it cannot be read: then nothing changes.
    """
    try:
        # Private: torch reads TORCH_CPP_LOG_LEVEL when it is imported, and never again. Without: warnings are printed.
        library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / CPP_LIBRARY))
        found = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None
    before, found.value = found.value, level
    return before


def set_default_rpc_timeout(seconds: float) -> None:
    """Set the time-out of the program's own ``rpc_sync`` and ``rpc_async`` in the RPC group that is running.

    Without the name they keep the time-out that the group was started with; torchopt_dist's calls name their own.
    """
    set_timeout = getattr(rpc, "_set_rpc_timeout", None)
    if set_timeout is not None:
        set_timeout(seconds)


def init_distributed_autograd(rank: int) -> None:
    """Let this process have contexts of ``torch.distributed.autograd``, as ``init_rpc`` does where torch's RPC runs.

    Without the name ``todist.autograd.context()`` is an error of torch's where calls go over another transport.
    """
    init = _find("_C._distributed_autograd._init")
    if init is not None:
        with suppress(RuntimeError):  # this process had another rank before, as it may not
            init(rank)


def tensorpipe_options_with_sockets() -> rpc.TensorPipeRpcBackendOptions:
    """Options of an RPC group whose workers speak through sockets only, not through shared memory.

    Without the name they are torch's default options: waiting workers keep cores busy, and beyond some forty workers on
    one machine the group does not start.
    """
    try:
        return rpc.TensorPipeRpcBackendOptions(_transports=["uv"])
    except TypeError:
        return rpc.TensorPipeRpcBackendOptions()


# Threads and processes.


profiler_is_on: Callable[[], bool] = getattr(torch.autograd, "_profiler_enabled", bool)
"""Whether ``torch.profiler`` records what this thread does: torch's own function, since each phase of a call asks.

Without the name the answer is always no, as of ``bool()``: the phases of a call are no ranges in its traces.
"""


def exception_in(thread: int) -> BaseException | None:
    """The exception that a thread handles, in an ``except`` or ``finally`` block; ``thread`` is its identifier.

    Without the name there is none: a ``finally`` block that runs when another rank fails may be interrupted.
    """
    exceptions = getattr(sys, "_current_exceptions", None)
    found = None if exceptions is None else exceptions().get(thread)
    handled: BaseException | None = (
        found[1] if isinstance(found, tuple) else found
    )  # a tuple before Python 3.12
    return handled


def frame_of(thread: int) -> FrameType | None:
    """The frame that a thread runs; ``thread`` is its identifier.

    Without the name there is none: a ``finally`` block that was entered in order may be interrupted.
    """
    frames = getattr(sys, "_current_frames", None)
    found: FrameType | None = None if frames is None else frames().get(thread)
    return found


def interpreter_flags() -> list[str]:
    """The options of this Python, such as ``-W error``, as the arguments of another one.

    Without the name there are none: such a process runs with Python's defaults.
    """
    flags = getattr(util, "_args_from_interpreter_flags", None)
    return [] if flags is None else list(flags())


def leave_finalizers() -> None:
    """Keep all existing ``weakref.finalize`` objects from being called when this process, a forked one, ends.

    They clean up what belongs to the parent process. Torch has one for each of its libraries of operators, and calling
    these writes to, and so copies, 35 MB of the parent's memory. Without the name they are called.
    """
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        finalizer.atexit = False


def finish_interpreter() -> None:
    """Do what Python does before it ends: wait for threads that are not daemons, then run the functions of ``atexit``.

    Without the names each such thread is joined in turn, and functions of ``atexit`` do not run.
    """
    wait_for_threads = getattr(threading, "_shutdown", None)
    if wait_for_threads is not None:
        wait_for_threads()
    else:
        for thread in threading.enumerate():
            if not thread.daemon and thread is not threading.current_thread():
                thread.join()
    run_functions = getattr(atexit, "_run_exitfuncs", None)
    if run_functions is not None:
        run_functions()
