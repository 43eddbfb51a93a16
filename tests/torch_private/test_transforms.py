"""What still works, and what is lost, where ``torch.func`` lacks a private name: each is hidden here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import torchopt_dist as todist
from torchopt_dist import torch_private as private
from torchopt_dist.distributed.serialization.pickling import pack
from torchopt_dist.ops._adam import adam_
from torchopt_dist.torch_private import transforms


def test_a_wrapped_tensor_is_refused_by_torch_where_it_cannot_be_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def answer(x: torch.Tensor) -> torch.Tensor:
        answers.append(private.is_functorch_tensor(x))
        with pytest.raises(todist.errors.SerializationError, match=r"torch\.func transform cannot be sent"):
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
        answers.append(private.transforms_are_active())
        solution: torch.Tensor = todist.linear_solve.solve_cg()(lambda v: factor * v, torch.ones(2))
        return solution

    answers: list[bool] = []
    factors = torch.tensor([1.0, 2.0])
    torch.testing.assert_close(torch.vmap(solve)(factors)[:, 0], 1 / factors)
    hidden = SimpleNamespace(_C=SimpleNamespace(_functorch=torch._C._functorch))
    monkeypatch.setattr(transforms, "torch", hidden)  # torch itself needs the name
    torch.testing.assert_close(solve(factors[1]), torch.full((2,), 0.5))
    with pytest.raises(Exception, match=r"vmap|functorch|batch"):
        torch.vmap(solve)(factors)
    assert answers == [True, False, False]


def test_a_transformation_in_a_product_goes_unnoticed_without_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(x: torch.Tensor) -> torch.Tensor:
        outer = private.transform_level()
        torch.vmap(lambda y: (seen.append((outer, private.tensor_at_level(y, outer) is y)), y)[1])(x)
        return x

    seen: list[tuple[int, bool]] = []
    torch.vmap(look)(torch.ones(2, 2))
    monkeypatch.setattr(transforms, "find", lambda path: None)
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


@pytest.mark.parametrize("hide", [False, True])
def test_a_gradient_inside_transforms_is_none_where_the_loss_does_not_depend_on_a_tensor(
    monkeypatch: pytest.MonkeyPatch, hide: bool
) -> None:
    """The others are those of ``torch.func.grad_and_value``, to every order, and an error leaves no level open."""
    if hide:
        monkeypatch.delattr(torch._C._functorch, "_wrap_for_grad")

    def task(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        def loss(leaves: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
            return (leaves[0] * x).sin().sum(), [leaves[0] * 3, x]

        (used, unused), value, (tripled, same) = private.grads_inside_transforms(loss, [w * w, w])
        assert used is not None
        assert unused is None
        assert same is x
        (none,), *_ = private.grads_inside_transforms(lambda leaves: (x.sum(), []), [w])
        assert none is None
        return torch.cat([used * value, tripled])

    def like(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        used, value = torch.func.grad_and_value(lambda leaf: (leaf * x).sin().sum())(w * w)
        return torch.cat([used * value, 3 * w * w])

    xs, w = torch.linspace(0, 1, 6).reshape(3, 2), torch.tensor([0.5, 0.7], requires_grad=True)
    both = [torch.vmap(function, in_dims=(0, None))(xs, w) for function in (task, like)]
    torch.testing.assert_close(both[0], both[1])
    torch.testing.assert_close(*(torch.autograd.grad(one.sin().sum(), w)[0] for one in both))
    values = torch.tensor([0.5, 0.7])
    torch.testing.assert_close(
        *(torch.func.hessian(lambda w, f=f: f(xs[0], w).sum())(values) for f in (task, like))
    )

    def fails(leaves: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        raise ValueError("of the loss")

    with pytest.raises(ValueError, match="of the loss"):
        private.grads_inside_transforms(fails, [values])
    assert private.transform_level() == 0
    with pytest.raises(RuntimeError, match="inside of a function being transformed"):
        torch.vmap(lambda x: x.requires_grad_())(xs)


def test_without_an_entrance_a_loss_that_uses_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._functorch.vmap, "_add_batch_dim", raising=True)
    assert [name for _, name in private.entrances_for_tensors()] == ["unwrap_dead_wrappers", "_wrap_for_grad"]
