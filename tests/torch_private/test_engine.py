"""What still works, and what is lost, where torch's engine lacks a private name: each is hidden here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchopt_dist import torch_private as private


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
def test_the_next_node_has_the_number_that_is_told_unless_it_is_hidden(
    monkeypatch: pytest.MonkeyPatch, hide: bool
) -> None:
    leaf = torch.ones((), requires_grad=True)
    leaf.view(())  # so that the number is not 0
    if hide:
        monkeypatch.delattr(torch._C._autograd, "_get_sequence_nr")
    told = private.next_sequence_number()
    number = leaf.view(()).grad_fn._sequence_nr()
    assert number > 0
    assert told == (0 if hide else number)


def test_nodes_are_numbered_in_the_order_in_which_they_were_made_unless_numbers_are_hidden() -> None:
    leaf = torch.ones((), requires_grad=True)
    first, second = (leaf.view(()).grad_fn for _ in range(2))
    number = private.sequence_numbers(second)
    assert number(second) == number(first) + 1
    hidden: Any = SimpleNamespace()
    assert private.sequence_numbers(hidden)(hidden) == 2**64 - 1


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
def test_edges_are_differentiated_as_torch_does_it_even_where_the_engine_is_hidden(
    monkeypatch: pytest.MonkeyPatch, hide: bool
) -> None:
    if hide:
        monkeypatch.setattr(torch.autograd, "Variable", SimpleNamespace())
    x, unused = torch.tensor([2.0], requires_grad=True), torch.tensor([1.0], requires_grad=True)
    edges = [torch.autograd.graph.get_gradient_edge(value) for value in (x**3, x**2)]
    bars = [torch.tensor([0.5]), torch.tensor([2.0])]
    grad, none = private.grad_of_edges(edges, [x, unused], bars, create_graph=True)
    assert grad is not None
    assert none is None
    torch.testing.assert_close(grad.detach(), torch.tensor([0.5 * 12.0 + 2.0 * 4.0]))
    torch.testing.assert_close(torch.autograd.grad(grad, x)[0], torch.tensor([0.5 * 12.0 + 4.0]))
    (plain, _) = private.grad_of_edges(edges, [x, unused], bars)
    assert plain is not None
    assert not plain.requires_grad
    with pytest.raises(RuntimeError, match="second time"):
        private.grad_of_edges(edges, [x], bars)


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
