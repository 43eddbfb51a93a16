"""What still works, and what is lost, where torch's graphs and tensors lack a private name: each is hidden here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import torchopt_dist as todist
from torchopt_dist import torch_private as private


def missing(_: object) -> Any:
    raise AttributeError("hidden")


def test_results_of_nodes_have_a_size_unless_it_is_hidden() -> None:
    results = torch.ones(3, 4, requires_grad=True, dtype=torch.float64) * 2
    assert private.bytes_of_results(results.grad_fn) == 96
    assert private.bytes_of_results(SimpleNamespace()) == 0


def test_memory_is_counted_as_it_comes_and_goes_unless_that_is_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.ones(1000, dtype=torch.float64, requires_grad=True)
    with private.memory_of_results(x.device) as most:
        assert most is not None
        assert most() == 0
        assert x.view(10, 100).T.shape == (100, 10)
        assert most() == 0
        y = x.exp()
        z = y.sum()
        assert most() == 8008
        del y, z
        x.detach().numpy()
        assert most() == 8008
        loss = (x * 2).square().sum()
        loss.backward()  # x * 2, the gradient of it twice and that of x, or one less
        assert 24_000 <= most() <= 32_100
    monkeypatch.setattr(torch.utils._python_dispatch, "TorchDispatchMode", None)
    with private.memory_of_results(x.device) as most:
        assert most is None


def test_a_graph_is_used_up_after_a_backward_unless_that_is_hidden() -> None:
    x = torch.ones(3, 4, requires_grad=True)
    for make in (lambda: x.exp().sum() * 2 - 1, lambda: x.sum() + 1, lambda: x.tanh().mean().view(1)):
        loss = make()
        assert not private.is_used_up(loss.grad_fn)
        loss.sum().backward(retain_graph=True)
        assert not private.is_used_up(loss.grad_fn)
        loss.sum().backward()
        assert private.is_used_up(loss.grad_fn) == ("Sum" not in str(loss.grad_fn.next_functions[0]))
    assert not private.is_used_up(SimpleNamespace())


def test_tensors_are_asked_themselves_unless_that_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return 17

    with Other():
        with private.without_modes():
            assert torch.zeros(2)._version == 0
        monkeypatch.delattr(torch._C, "DisableTorchFunction")
        with private.without_modes():
            assert torch.zeros(2) == 17


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


def test_forward_mode_counts_as_active_where_its_level_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not private.forward_mode_is_active()
    with forward_ad.dual_level():
        assert private.forward_mode_is_active()
    monkeypatch.delattr(forward_ad, "_current_level")
    assert private.forward_mode_is_active()


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


def test_many_gradients_at_a_time_are_told_apart() -> None:
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append(private.is_batched_gradient(grad)))
    torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True, retain_graph=True)
    torch.autograd.grad(y, x, torch.ones(2))
    assert seen == [True, False]


def test_what_a_backward_computes_again_may_draw_where_many_gradients_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.ones(2, requires_grad=True)
    y = todist.remat(lambda x: torch.dropout(x, 0.5, True) * x)(x)
    rows = torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True, retain_graph=True)[0]
    torch.testing.assert_close(rows, torch.diag(2 * y.detach()))
    find = private.graph.find
    monkeypatch.setattr(private.graph, "find", lambda path: None if "vmapmode" in path else find(path))
    with pytest.raises(RuntimeError, match="random operations inside of vmap"):
        torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True)


def test_many_gradients_are_taken_apart_and_put_together() -> None:
    seen: list[Tensor] = []

    def look(grad: Tensor) -> Tensor:
        with private.outside_of_batched_gradients() as level:
            assert level is not None
            torch.rand(2)  # which is an error where many gradients are gone over
            seen.append(private.rows_of_gradient(grad, level))
            return private.batched_gradient(2 * seen[0], level)

    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(look)
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    found = torch.autograd.grad(y, x, rows, is_grads_batched=True)[0]
    assert torch.equal(seen[0], rows)
    assert torch.equal(found, 4 * rows)


def test_a_product_that_follows_a_graph_to_results_is_refused_where_they_cannot_be_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    w = torch.tensor([0.3, 0.8], dtype=torch.float64, requires_grad=True)

    def solve() -> Tensor:
        (gradient,) = torch.autograd.grad(w.exp().sum(), w, create_graph=True)
        return todist.linear_solve.solve_cg(rtol=1e-12)(
            lambda v: torch.autograd.grad(gradient, w, v, create_graph=True)[0], torch.ones_like(w)
        )

    torch.testing.assert_close(torch.autograd.grad(solve().sum(), w)[0], -(-w).exp())
    monkeypatch.delattr(
        "torch.utils._python_dispatch.TorchDispatchMode"
    )  # "tensors_entering" then finds nothing
    with pytest.raises(ValueError, match="result of ExpBackward0 that is no argument of its operations"):
        solve()


def test_a_gradient_that_from_local_redistributes_is_known_unless_names_are_hidden() -> None:
    one, other = (SimpleNamespace(is_partial=lambda: False, is_replicate=lambda: False) for _ in range(2))
    partial = SimpleNamespace(is_partial=lambda: True, is_replicate=lambda: False)
    whole = SimpleNamespace(is_partial=lambda: False, is_replicate=lambda: True)

    def ends(wanted: Any, given: Any, **names: Any) -> bool:
        node = SimpleNamespace(forward_input_placements=(wanted,), **names)
        return private.ends_gradients_graph(node, (SimpleNamespace(placements=(given,)),))

    assert ends(one, other)
    assert not ends(one, one)
    assert ends(partial, partial)  # whose gradient is made whole
    assert not ends(partial, whole)
    assert not ends(one, other, grad_placements=(other,))
    assert not private.ends_gradients_graph(SimpleNamespace(), (SimpleNamespace(placements=(one,)),))
    assert not private.ends_gradients_graph(SimpleNamespace(forward_input_placements=(one,)), (None,))


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def test_functions_that_are_differentiable_once_are_known_unless_their_names_are_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.ones(2, requires_grad=True)
    y = _Once.apply(x)
    assert private.once_differentiable_name(type(y.grad_fn)) == "_Once"
    assert private.once_differentiable_name(type(x.exp().grad_fn)) is None
    (grad,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
    assert private.is_refusal(type(grad.grad_fn))
    assert not private.is_refusal(type(y.grad_fn))
    assert not private.is_refusal(SimpleNamespace)
    monkeypatch.setattr(type(y.grad_fn), "_forward_cls", None)
    assert private.once_differentiable_name(type(y.grad_fn)) is None


def test_a_checkpoint_is_found_unless_it_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    found = private.recomputing_checkpoint()
    assert found is not None
    module, name = found
    assert callable(getattr(module, name))
    monkeypatch.delattr(module, name)
    assert private.recomputing_checkpoint() is None
