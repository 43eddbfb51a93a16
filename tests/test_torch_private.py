"""What still works, and what is lost, where torch lacks a private name: each is hidden here, one test a name."""

from __future__ import annotations

import ast
import inspect
import multiprocessing.util
import runpy
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed import rpc
from torch.overrides import TorchFunctionMode

import torchopt_dist as todist
from torchopt_dist import _torch_private as private
from torchopt_dist.distributed._serialization import pack
from torchopt_dist.ops._adam import adam_

PACKAGE = Path(__file__).resolve().parents[1] / "torchopt_dist"


def missing(_: object) -> Any:
    raise AttributeError("hidden")


def test_nodes_keep_torchs_order_without_sequence_numbers() -> None:
    x = torch.ones(2, requires_grad=True)
    first, second = x.sin(), x.cos()
    private.set_sequence_number(first, 2**60)
    assert first.grad_fn._sequence_nr() == 2**60
    hidden: Any = SimpleNamespace(grad_fn=SimpleNamespace())
    private.set_sequence_number(hidden, 3)
    (first + second).sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos() - x.detach().sin())


@pytest.mark.parametrize("hide", [False, True])
def test_a_thread_numbers_its_nodes_after_those_of_another_unless_numbers_are_hidden(
    monkeypatch: pytest.MonkeyPatch, hide: bool
) -> None:
    leaf = torch.ones((), requires_grad=True)
    numbers: list[int] = []

    def one_thread() -> None:
        numbers.extend(leaf.view(()).grad_fn._sequence_nr() for _ in range(100))

    def other_thread() -> None:
        private.advance_sequence_numbers(numbers[-1] + 1)
        numbers.append(leaf.view(()).grad_fn._sequence_nr())

    if hide:
        monkeypatch.delattr(torch._C._autograd, "_get_sequence_nr")
    for target in (one_thread, other_thread):  # this one may have made millions
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
    assert numbers == [*range(100), 0 if hide else 100]


@pytest.mark.parametrize("hide", [False, True])
@pytest.mark.parametrize("retain_graph", [False, True])
def test_every_graph_counts_as_kept_where_the_engine_does_not_say(
    monkeypatch: pytest.MonkeyPatch, hide: bool, retain_graph: bool
) -> None:
    if hide:
        monkeypatch.delattr(torch._C._autograd, "_get_current_graph_task_keep_graph")
    answers = []
    x = torch.ones((), requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: answers.append(private.engine_keeps_graph()))
    y.backward(retain_graph=retain_graph)
    assert answers == [retain_graph or hide]


def test_results_of_nodes_have_a_size_unless_it_is_hidden() -> None:
    results = torch.ones(3, 4, requires_grad=True, dtype=torch.float64) * 2
    assert private.bytes_of_results(results.grad_fn) == 96
    assert private.bytes_of_results(SimpleNamespace()) == 0


@pytest.mark.parametrize("hide", [False, True])
def test_backwards_have_numbers_unless_these_are_hidden(monkeypatch: pytest.MonkeyPatch, hide: bool) -> None:
    if hide:
        monkeypatch.delattr(torch._C, "_current_graph_task_id")
    runs: list[int] = []
    for _ in range(2):
        y = torch.ones((), requires_grad=True) * 2
        y.register_hook(lambda _: runs.append(private.engine_run()))
        y.backward()
    assert private.engine_run() == -1
    assert runs == [-1, -1] if hide else runs[0] != runs[1] and min(runs) >= 0


@pytest.mark.parametrize("hide", [False, True])
def test_a_hook_is_told_its_node_unless_it_is_hidden(monkeypatch: pytest.MonkeyPatch, hide: bool) -> None:
    if hide:
        monkeypatch.delattr(torch._C, "_current_autograd_node")
    y = torch.ones((), requires_grad=True) * 2
    told: list[object] = []
    assert y.grad_fn is not None
    y.grad_fn.register_hook(lambda *_: told.append(private.evaluating_node()))
    expected = None if hide else y.grad_fn
    y.backward()
    assert told == [expected]


@pytest.mark.parametrize("hide", [False, True])
def test_every_gradient_counts_as_needed_where_the_engine_does_not_say(
    monkeypatch: pytest.MonkeyPatch, hide: bool
) -> None:
    if hide:
        monkeypatch.delattr(torch._C, "_will_engine_execute_node")
    x, y = torch.ones((), requires_grad=True), torch.ones((), requires_grad=True)
    middle = x * 2
    product = middle * y
    answers: list[list[bool]] = []

    def ask(_: object) -> None:
        assert product.grad_fn is not None
        answers.append([private.engine_needs_node(node) for node, _ in product.grad_fn.next_functions])

    product.register_hook(ask)
    for inputs in ([x], [middle], [y]):
        torch.autograd.grad(product, inputs, retain_graph=True)
    product.backward()
    assert answers == [[True, hide], [True, hide], [hide, True], [True, True]]


@pytest.mark.parametrize("hide", [False, True])
def test_a_gradient_that_was_asked_for_by_name_is_told_from_an_accumulated_one(
    monkeypatch: pytest.MonkeyPatch, hide: bool
) -> None:
    if hide:
        monkeypatch.setattr(torch._C, "_will_engine_execute_node", None)
    x = torch.ones((), requires_grad=True)
    product, answers = x * 2, []
    product.register_hook(
        lambda _: answers.append(private.engine_captures_leaf(product.grad_fn.next_functions[0][0]))
    )
    torch.autograd.grad(product, x, retain_graph=True)
    product.backward()
    assert answers == [not hide, False]


@pytest.mark.parametrize("hide", [False, True])
def test_a_loss_is_differentiated_as_torch_does_it_even_where_the_engine_is_hidden(
    monkeypatch: pytest.MonkeyPatch, hide: bool
) -> None:
    class Seen(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    if hide:
        monkeypatch.setattr(torch.autograd, "Variable", SimpleNamespace())
    x, y, unused = (torch.tensor([2.0], requires_grad=True) for _ in range(3))
    loss = x**3 * y.exp()
    given = private.grad_of_loss(loss, [y], torch.tensor([0.5]), retain_graph=True)
    (twice,) = given
    assert twice is not None
    assert not twice.requires_grad
    torch.testing.assert_close(twice, 4 * y.detach().exp())
    of_x, none = private.grad_of_loss(loss, [x, unused], create_graph=True)
    assert of_x is not None
    assert none is None
    (second,) = private.grad_of_loss(of_x, [x])
    torch.testing.assert_close(second, 12 * y.detach().exp())
    with pytest.raises(RuntimeError, match="second time"):
        private.grad_of_loss(of_x, [x])
    with pytest.raises(RuntimeError, match="only for real scalar outputs"):
        private.grad_of_loss(x * 1j, [x])
    seen: list[Any] = []
    with Seen():
        private.grad_of_loss(x * 2, [x])
    assert torch.autograd.grad in seen


@pytest.mark.parametrize("hide", [False, True])
def test_autocast_is_found_to_be_on_even_where_it_is_asked_device_by_device(
    monkeypatch: pytest.MonkeyPatch, hide: bool
) -> None:
    if hide:
        monkeypatch.delattr(torch._C, "_is_any_autocast_enabled")
    assert not private.autocast_is_on()
    with torch.autocast("cpu", torch.bfloat16):
        assert private.autocast_is_on()
        with torch.autocast("cpu", enabled=False):
            assert not private.autocast_is_on()


def test_changes_in_place_go_unnoticed_without_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(2)
    before = private.tensor_version(x)
    x.add_(1)
    assert private.tensor_version(x) == 1 != before
    monkeypatch.setattr(torch.Tensor, "_version", property(missing), raising=False)
    assert private.tensor_version(x) is None


@pytest.mark.parametrize("hide", [False, True])
def test_memory_counts_as_shared_where_its_holders_are_hidden(
    monkeypatch: pytest.MonkeyPatch, hide: bool
) -> None:
    if hide:
        monkeypatch.delattr(torch._C, "_storage_Use_Count")
    x = torch.ones(3)
    assert private.memory_is_shared(x) == hide
    for take in (Tensor.detach, lambda x: x[1:], lambda x: x.requires_grad_() * x, Tensor.untyped_storage):
        held = take(x.detach())
        assert private.memory_is_shared(x) or take is Tensor.untyped_storage
        del held
    assert private.memory_is_shared(x) == hide
    assert private.memory_is_shared(x.to_sparse())


def test_saved_tensors_count_as_packed_where_hooks_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not private.saved_tensors_are_packed()
    with torch.autograd.graph.save_on_cpu():
        assert private.saved_tensors_are_packed()
    monkeypatch.delattr(torch._C._autograd, "_top_saved_tensors_default_hooks")
    assert private.saved_tensors_are_packed()


def test_forward_mode_counts_as_active_where_its_level_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not private.forward_mode_is_active()
    with forward_ad.dual_level():
        assert private.forward_mode_is_active()
    monkeypatch.delattr(forward_ad, "_current_level")
    assert private.forward_mode_is_active()


def test_a_wrapped_tensor_is_refused_by_torch_where_it_cannot_be_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def answer(x: torch.Tensor) -> torch.Tensor:
        answers.append(private.is_functorch_tensor(x))
        with pytest.raises(todist.SerializationError, match=r"torch\.func transform cannot be sent"):
            pack(x, main_by_name=True)
        return x

    answers: list[bool] = []
    torch.func.vmap(answer)(torch.ones(2))
    monkeypatch.delattr(torch._C._functorch, "is_functorch_wrapped_tensor")
    torch.func.vmap(lambda x: (answers.append(private.is_functorch_tensor(x)), x)[1])(torch.ones(2))
    assert answers == [True, False]
    assert not private.is_functorch_tensor(torch.ones(2))


def test_vmap_refuses_a_seed_where_transformations_cannot_be_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(x: torch.Tensor) -> torch.Tensor:
        with private.outside_of_transforms():
            drawn.append(int(torch.randint(9, ()).item()))
        return x

    drawn: list[int] = []
    torch.func.vmap(draw)(torch.ones(2))
    assert len(drawn) == 1
    monkeypatch.delattr(torch._functorch.pyfunctorch, "temporarily_clear_interpreter_stack")
    with pytest.raises(RuntimeError, match="random"):
        torch.func.vmap(draw)(torch.ones(2))


def test_a_batch_of_systems_is_refused_by_torch_where_transformations_cannot_be_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def solve(factor: torch.Tensor) -> torch.Tensor:
        solution: torch.Tensor = todist.linear_solve.solve_cg()(lambda v: factor * v, torch.ones(2))
        return solution

    factors = torch.tensor([1.0, 2.0])
    torch.testing.assert_close(torch.vmap(solve)(factors)[:, 0], 1 / factors)
    monkeypatch.setattr(private, "_find", lambda path: None)  # torch itself needs the name
    assert not private.transforms_are_active()
    torch.testing.assert_close(solve(factors[1]), torch.full((2,), 0.5))
    with pytest.raises(Exception, match=r"vmap|functorch|batch"):
        torch.vmap(solve)(factors)


def test_a_transformation_in_a_product_goes_unnoticed_without_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(x: torch.Tensor) -> torch.Tensor:
        outer = private.transform_level()
        torch.vmap(lambda y: (seen.append((outer, private.tensor_at_level(y, outer) is y)), y)[1])(x)
        return x

    seen: list[tuple[int, bool]] = []
    torch.vmap(look)(torch.ones(2, 2))
    monkeypatch.setattr(private, "_find", lambda path: None)
    torch.vmap(look)(torch.ones(2, 2))
    assert seen == [(1, False), (0, True)]


def test_an_inner_loop_inside_vmap_is_refused_where_vmap_cannot_be_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def adapt(x: torch.Tensor) -> torch.Tensor:
        levels.append(private.vmaps())
        clone = todist.module_clone(net)
        todist.MetaSGD(clone, lr=0.1).step(clone(x).sum())
        moved: torch.Tensor = clone(x).sum()
        return moved

    levels: list[list[tuple[int, int]]] = []
    net, x = nn.Linear(2, 1), torch.ones(3, 2)
    torch.vmap(adapt)(x)
    assert levels == [[(1, 3)]]
    monkeypatch.delattr(torch._C._functorch, "CVmapInterpreterPtr")
    with pytest.raises(ValueError, match="inside `vmap`, make the MetaOptimizer inside"):
        torch.vmap(adapt)(x)
    assert levels[-1] == []


def test_a_replayed_loop_inside_vmap_is_recorded_where_vmap_cannot_be_entered_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def adapt(x: torch.Tensor) -> torch.Tensor:
        found.append(private.vmap_randomness())
        made: torch.Tensor = todist.inner_loop(
            lambda w: ((w - x) ** 4).sum(), todist.sgd(lr=0.1), p, 2, adjoint=todist.Replayed()
        ).params
        return made

    found: list[list[str] | None] = []
    p, x = torch.ones(2, requires_grad=True), torch.linspace(0, 1, 6).reshape(3, 2)
    (expected,) = torch.autograd.grad(torch.vmap(adapt, randomness="same")(x).sum(), p)
    assert found == [["same"]]
    monkeypatch.delattr(torch._C._functorch, "CVmapInterpreterPtr")
    with pytest.warns(UserWarning, match="records all steps inside of torch.func's transforms"):
        (recorded,) = torch.autograd.grad(torch.vmap(adapt)(x).sum(), p)
    assert found[1] is None
    torch.testing.assert_close(recorded, expected)


def test_values_of_a_batch_are_found_and_put_back() -> None:
    def look(x: torch.Tensor) -> torch.Tensor:
        ((level, _),) = private.vmaps()
        assert private.batch_of(torch.ones(2), level) is None
        found = private.batch_of(x, level)
        assert found is not None
        assert found[0].shape == (2, 3)
        return private.batched(found[0] * 2, found[1], level)

    x = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(torch.vmap(look, in_dims=1, out_dims=1)(x), 2 * x)


def test_differences_are_the_same_where_hooks_and_numbers_of_nodes_cannot_be_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def of_scale() -> Tensor:
        w = torch.ones(2, requires_grad=True)
        adapted = todist.inner_loop(
            lambda w: scale * (w**3).sum(), todist.sgd(lr=0.1), w, 2, meta=scale, adjoint=todist.SAMA()
        ).params
        return torch.autograd.grad(adapted.sum(), scale)[0]

    scale = torch.tensor(0.5, requires_grad=True)
    assert not private.has_hooks(scale)
    made = (scale * 2).grad_fn
    assert private.sequence_numbers(made)(made) < 2**63
    expected = of_scale()
    monkeypatch.setattr("torchopt_dist.diff.adjoints._differences.has_hooks", lambda _: True)
    torch.testing.assert_close(of_scale(), expected)
    hidden: Any = SimpleNamespace()
    assert private.has_hooks(hidden)
    assert private.sequence_numbers(hidden)(hidden) == 2**64 - 1
    handle = scale.register_hook(lambda grad: grad)
    assert private.has_hooks(scale)
    handle.remove()


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("_parameters", private.parameters_of),
        ("_buffers", private.buffers_of),
        ("_modules", private.children_of),
    ],
)
def test_a_module_without_its_dictionaries_is_an_error_that_names_them(name: str, read: Any) -> None:
    module = nn.BatchNorm1d(2)
    assert read(module) is vars(module)[name]
    del vars(module)[name]
    with pytest.raises(RuntimeError, match=f"`{name}` of torch.nn.Module, which a BatchNorm1d does not have"):
        read(module)


def test_the_default_timeout_stays_where_it_cannot_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(rpc, "_set_rpc_timeout", asked.append)
    private.set_default_rpc_timeout(3.0)
    assert asked == [3.0]
    monkeypatch.delattr(rpc, "_set_rpc_timeout")
    private.set_default_rpc_timeout(4.0)
    assert asked == [3.0]


def test_a_process_without_rpc_has_contexts_of_distributed_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch._C._distributed_autograd, "_init", asked.append)
    private.init_distributed_autograd(3)
    assert asked == [3]

    def refuse(rank: int) -> None:
        raise RuntimeError(f"initialized with another rank than {rank}")

    monkeypatch.setattr(torch._C._distributed_autograd, "_init", refuse)
    private.init_distributed_autograd(3)
    monkeypatch.delattr(torch._C._distributed_autograd, "_init")
    private.init_distributed_autograd(3)


def test_options_are_torchs_own_where_the_transports_cannot_be_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(rpc, "TensorPipeRpcBackendOptions", lambda **options: asked.append(options))
    private.tensorpipe_options_with_sockets()
    assert asked == [{"_transports": ["uv"]}]

    def without_transports(*, num_worker_threads: int = 16) -> int:
        return num_worker_threads

    monkeypatch.setattr(rpc, "TensorPipeRpcBackendOptions", without_transports)
    assert private.tensorpipe_options_with_sockets() == 16


def adam_step(fused: bool | None = None) -> torch.Tensor:
    p = torch.ones(3)
    adam_(
        [p],
        [torch.ones(3)],
        [torch.zeros(3)],
        [torch.zeros(3)],
        [0.0],
        lr=0.1,
        b1=0.9,
        b2=0.9,
        eps=0.1,
        fused=fused,
    )
    return p


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_a_step_in_place_goes_on_without_torchs_fused_one(
    monkeypatch: pytest.MonkeyPatch, kind: type[torch.optim.Optimizer]
) -> None:
    name = kind.__name__
    step = private.fused_step(name.lower())
    assert step is getattr(torch, f"_fused_{name.lower()}_")
    monkeypatch.delattr(torch, f"_fused_{name.lower()}_")
    assert private.fused_step(name.lower()) is None
    ends = []
    for optimizer_class in (kind, getattr(todist, name)):
        p = nn.Parameter(torch.ones(3))
        optimizer = optimizer_class([p], lr=0.1)
        for factor in (1.0, 2.0):
            p.grad = torch.full((3,), factor)
            optimizer.step()
        ends.append(p.detach())
    torch.testing.assert_close(*ends)


def test_no_op_has_a_kernel_where_the_dispatcher_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    assert private.has_kernel("aten::add.Tensor", "cpu")
    assert not private.has_kernel("todist::no_such_op", "cpu")
    monkeypatch.delattr(torch._C, "_dispatch_has_kernel_for_dispatch_key")
    assert not private.has_kernel("aten::add.Tensor", "cpu")


@pytest.mark.parametrize("hide", [False, True])
def test_a_function_is_traced_where_the_compiler_cannot_be_kept_out(
    monkeypatch: pytest.MonkeyPatch, hide: bool
) -> None:
    if hide:
        monkeypatch.delattr(torch._compile, "_disable_dynamo")
    traced = []

    @private.left_to_python
    def double(x: Tensor) -> Tensor:
        traced.append(torch.compiler.is_compiling())
        return 2 * x

    compiled = torch.compile(lambda x: double(x) + 1, backend="eager")
    assert compiled(torch.ones(1)).item() == 3.0
    assert traced == [hide]


class Doubled(torch.autograd.Function):
    @classmethod
    def apply(cls, *args: Any) -> Any:
        return private.apply_function(cls, *args)

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


@pytest.mark.parametrize("hide", [False, True])
def test_functions_are_applied_by_torchs_own_way_without_the_short_one(
    monkeypatch: pytest.MonkeyPatch, hide: bool
) -> None:
    if hide:
        monkeypatch.setattr(torch, "_functorch", SimpleNamespace())
    x = torch.ones(2, requires_grad=True)
    assert torch.autograd.grad(Doubled.apply(x).sum(), x)[0].tolist() == [2, 2]
    if not hide:  # torch's own way needs the name where a transformation is active
        assert torch.func.grad(lambda x: Doubled.apply(x).sum())(x.detach()).tolist() == [2, 2]


def test_no_kernel_runs_in_transformations_where_torch_does_not_say_which(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    want = adam_step(fused=False)
    answers: list[bool] = []

    def asked(x: torch.Tensor) -> torch.Tensor:
        answers.extend((private.transforms_are_active(), private.transforms_are_only("Grad", "Vmap")))
        answers.append(private.transforms_are_only("Vmap"))
        return x.sum()

    torch.func.grad(asked)(torch.ones(2))
    asked(torch.ones(2))
    assert answers == [True, True, False, False, True, True]
    monkeypatch.setattr(torch._C, "_functorch", SimpleNamespace())
    assert not private.transforms_are_only("Grad", "Vmap")
    assert not private.is_batched_gradient(torch.ones(2))
    torch.testing.assert_close(adam_step(), want)


def test_many_gradients_at_a_time_are_told_apart() -> None:
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append(private.is_batched_gradient(grad)))
    torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True, retain_graph=True)
    torch.autograd.grad(y, x, torch.ones(2))
    assert seen == [True, False]


@pytest.mark.parametrize("hide", [False, True])
def test_warnings_of_cpp_code_stay_where_their_level_cannot_be_set(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], hide: bool
) -> None:
    def warn() -> str:
        with pytest.raises(RuntimeError):  # nobody listens at port 1, of which torch's C++ code warns
            torch.distributed.TCPStore("127.0.0.1", 1, timeout=timedelta(milliseconds=300))
        return capfd.readouterr().err

    if hide:
        monkeypatch.setattr(private, "CPP_LIBRARY", "none")
    before = private.set_cpp_log_level(2)
    try:
        assert (before is None) is hide
        assert ("[W" in warn()) is hide
    finally:
        if before is not None:
            assert private.set_cpp_log_level(before) == 2
    assert "[W" in warn()


@pytest.mark.parametrize("hide", [False, True])
def test_no_thread_handles_an_exception_where_python_does_not_say(
    monkeypatch: pytest.MonkeyPatch, hide: bool
) -> None:
    if hide:
        monkeypatch.delattr(sys, "_current_exceptions")
    me, error = threading.get_ident(), ValueError("handled")
    assert private.exception_in(me) is None
    try:
        raise error
    except ValueError:
        assert private.exception_in(me) is (None if hide else error)
    assert private.exception_in(me) is None
    assert private.exception_in(-1) is None


@pytest.mark.parametrize("hide", [False, True])
def test_no_thread_has_a_frame_where_python_does_not_say(monkeypatch: pytest.MonkeyPatch, hide: bool) -> None:
    if hide:
        monkeypatch.delattr(sys, "_current_frames")
    frame = private.frame_of(threading.get_ident())
    assert (frame and frame.f_back) is (None if hide else inspect.currentframe())
    assert private.frame_of(-1) is None


@pytest.mark.parametrize("hide", [False, True])
def test_phases_are_no_ranges_where_the_profiler_cannot_be_asked(
    monkeypatch: pytest.MonkeyPatch, hide: bool
) -> None:
    if hide:
        monkeypatch.delattr(torch.autograd, "_profiler_enabled")
    imported = runpy.run_path(str(private.__file__))  # the name is looked up when the module is imported
    assert not imported["profiler_is_on"]()
    with torch.profiler.profile(acc_events=True):  # torch 2.11 warns without
        assert imported["profiler_is_on"]() is not hide


def test_an_interpreter_has_no_options_where_they_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "from torchopt_dist._torch_private import interpreter_flags; print(interpreter_flags())"
    command = [sys.executable, "-W", "error::FutureWarning", "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=PACKAGE.parent)
    assert "-Werror::FutureWarning" in ended.stdout, ended.stderr
    monkeypatch.delattr(multiprocessing.util, "_args_from_interpreter_flags")
    assert private.interpreter_flags() == []


@pytest.mark.parametrize("hide", [False, True])
def test_finalizers_that_there_are_run_at_the_end_where_they_are_hidden(
    monkeypatch: pytest.MonkeyPatch, hide: bool
) -> None:
    class Thing:
        pass

    things = [Thing(), Thing()]
    calls: list[int] = []
    finalizer = weakref.finalize(things[0], calls.append, 0)
    registry = vars(weakref.finalize)["_registry"]
    others = {each: each.atexit for each in registry}
    with monkeypatch.context() as patch:
        if hide:
            patch.delattr(weakref.finalize, "_registry")
        private.leave_finalizers()
    later = weakref.finalize(things[1], calls.append, 1)
    assert finalizer.atexit is hide
    assert later.atexit
    things.clear()
    assert sorted(calls) == [0, 1]  # they are called as ever when their objects end
    for each, atexit in others.items():
        each.atexit = atexit


FINISH = """
import atexit, os, sys, threading, time
from torchopt_dist import _torch_private

if sys.argv[1] == "hidden":
    del threading._shutdown, atexit._run_exitfuncs
started = threading.Event()


def work():
    started.wait(60)
    print("thread")


threading.Thread(target=work).start()
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
atexit.register(print, "atexit")
started.set()
_torch_private.finish_interpreter()
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.parametrize(("names", "lines"), [("there", ["thread", "atexit"]), ("hidden", ["thread"])])
def test_exit_functions_do_not_run_where_they_are_hidden_but_threads_end(
    names: str, lines: list[str]
) -> None:
    command = [sys.executable, "-c", FINISH, names]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=PACKAGE.parent)
    assert ended.stdout.splitlines() == lines, ended.stderr
    assert ended.returncode == 0


# No other file uses private names.

PRIVATE_ATTRIBUTES = {
    "_version",
    "_parameters",
    "_buffers",
    "_sequence_nr",
    "_set_sequence_nr",
    "_backward_hooks",
}
MODULES = ("torch", "threading", "atexit", "asyncio", "multiprocessing", "socket", "subprocess", "concurrent")


def private_names(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of each private name of torch or the standard library that a file uses.

    ``torch._foreach_*`` is public: torch's documentation has a section on these functions.
    """
    tree = ast.parse(source)
    foreign: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in MODULES:
                    foreign.add(alias.asname or alias.name.split(".")[0])
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            foreign |= {alias.asname or alias.name for alias in node.names}
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from ((node.lineno, name) for name in names if _is_private(name))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            root: ast.expr = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if node.attr in PRIVATE_ATTRIBUTES or (isinstance(root, ast.Name) and root.id in foreign):
                yield node.lineno, node.attr


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith(("__", "_foreach_"))


class _Nested(torch.autograd.Function):
    """Its backward makes another backward pass, and so on; the engine goes on in another thread where they are many."""

    apply: ClassVar[Any]

    @staticmethod
    def forward(ctx: Any, x: Tensor, depth: int, seen: set[tuple[int, object]]) -> Tensor:
        ctx.depth, ctx.seen = depth, seen
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.seen.add((threading.get_ident(), private.asking_thread()))
        if ctx.depth:
            with torch.enable_grad():
                _Nested.apply(torch.ones(1, requires_grad=True), ctx.depth - 1, ctx.seen).sum().backward()
        return grads[0], None, None


def test_a_thread_of_the_engine_answers_as_the_one_that_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    mine = private.asking_thread()
    seen: set[tuple[int, object]] = set()
    _Nested.apply(torch.ones(1, requires_grad=True), 70, seen).sum().backward()
    assert len({thread for thread, _ in seen}) == 2
    assert {token for _, token in seen} == {mine}


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("with_gpu", [False, True])
def test_a_thread_is_told_from_others(monkeypatch: pytest.MonkeyPatch, hidden: bool, with_gpu: bool) -> None:
    kept: list[str] = []
    if hidden:
        monkeypatch.delattr(torch._C, "_is_key_in_tls")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: with_gpu)
    monkeypatch.setattr(torch._C, "_stash_obj_in_tls", _recording(torch._C._stash_obj_in_tls, kept))
    mine, others = private.asking_thread(), []
    other = threading.Thread(target=lambda: others.append(private.asking_thread()))
    other.start()
    other.join()
    assert private.asking_thread() is mine
    assert others[0] is not mine
    assert bool(kept) is (with_gpu and not hidden)  # without a GPU nothing is kept that ends with a thread


def _recording(stash: Callable[[str, object], None], kept: list[str]) -> Callable[[str, object], None]:
    def record(key: str, value: object) -> None:
        kept.append(key)
        stash(key, value)

    return record


def test_no_other_file_uses_a_private_name() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line} uses {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name != "_torch_private.py"
        for line, name in private_names(path.read_text("utf-8"))
    ]
    assert not found


def test_private_names_are_found() -> None:
    source = (
        "import torch, atexit\nfrom torch.distributed import rpc\nfrom torch._dynamo import reset\n"
        "torch._C._functorch.peek()\nrpc._set_rpc_timeout(1)\nrpc.api._agent\nx._version\nself._own\n"
        "torch._foreach_add(a, b)\natexit._run_exitfuncs()\ntorch.__version__\n"
    )
    assert sorted(set(private_names(source))) == [
        (3, "_dynamo"),
        (4, "_C"),
        (4, "_functorch"),
        (5, "_set_rpc_timeout"),
        (6, "_agent"),
        (7, "_version"),
        (10, "_run_exitfuncs"),
    ]
