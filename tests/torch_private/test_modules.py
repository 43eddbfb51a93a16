"""What still works, and what is lost, where torch's modules lack a private name: each is hidden here."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import torchopt_dist as todist
from tests.rows import each_row
from torchopt_dist import torch_private as private
from torchopt_dist.torch_private import modules


@each_row(
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


def test_a_module_is_given_other_parameters_unless_its_dictionary_is_missing() -> None:
    module, other = nn.Linear(2, 1), nn.Linear(2, 1)
    private.set_parameters(module, private.parameters_of(other))
    assert module.weight is other.weight
    del vars(module)["_parameters"]
    with pytest.raises(RuntimeError, match=r"`_parameters` of torch.nn.Module, which a Linear does not have"):
        private.set_parameters(module, private.parameters_of(other))
    assert "_parameters" not in vars(module)


def test_what_calls_a_compiled_module_is_dropped_and_nothing_else() -> None:
    module = nn.Linear(2, 1)
    before = set(vars(module))
    module.compile(backend="eager")
    attributes = dict(vars(module))
    assert set(attributes) > before
    for _ in range(2):
        private.drop_compiled_call(attributes)
        assert set(attributes) == before


def test_what_means_something_for_a_forward_is_found_by_its_name_unless_that_is_hidden() -> None:
    module = nn.BatchNorm1d(2)
    names, registers = private.attributes_for_forward(module)
    assert {"training", "eps", "momentum"} <= {*names}
    assert "_backward_hooks" not in names
    assert any(one is module._buffers for one in registers)
    for name in ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"):
        del vars(module)[name]
    assert private.attributes_for_forward(module) == (
        [name for name in names if name in vars(module)],
        [],
    )


def test_without_the_name_of_the_hooks_a_module_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def hook(*_: object) -> None:
        return None

    module = nn.Linear(1, 1)
    assert not private.has_forward_hook(module, hook)
    module.register_forward_hook(hook)
    assert private.has_forward_hook(module, hook)
    monkeypatch.delattr(module, "_forward_hooks")
    assert not private.has_forward_hook(module, hook)


def _seen_after_steps(net: nn.Sequential, keep: bool) -> tuple[int, tuple[list[object], list[object]]]:
    """How many tensors of clones outlive three times two steps on a clone, and the modules that hooks were given."""
    given: list[object] = []
    handles = [part.register_full_backward_hook(lambda part, *_: given.append(part)) for part in net]
    handles += [part.register_full_backward_pre_hook(lambda part, *_: given.append(part)) for part in net]
    kept: list[nn.Sequential] = []
    made: list[weakref.ref[torch.Tensor]] = []

    def once() -> None:
        x = torch.ones(2, 3, requires_grad=True)  # or torch warns
        clone = todist.module_clone(net)
        inner = todist.MetaSGD(clone, lr=0.1)
        for _ in range(2):
            inner.step(clone(x).square().mean())
            made.extend(map(weakref.ref, clone.parameters()))
        loss = clone(x).square().mean()
        kept.extend([clone] if keep else [])
        del clone, inner
        given.clear()
        loss.backward()
        net.zero_grad()

    for _ in range(3):
        once()
    for handle in handles:
        handle.remove()
    last: list[object] = [part for clone in kept[-1:] for part in clone]
    found = list(given), last
    kept.clear()
    given.clear()
    gc.collect()
    return sum(one() is not None for one in made), found


def test_a_clone_with_backward_hooks_is_freed_and_hooks_get_their_modules() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    more, (given, _) = _seen_after_steps(net, keep=False)
    assert more == 0
    assert {*map(id, given)} == {*map(id, net)}  # the clone has gone
    _, (given, parts) = _seen_after_steps(net, keep=True)
    assert {*map(id, given)} == {*map(id, parts)}


def test_without_the_name_hooks_run_and_the_clone_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    home = torch.nn.modules.module
    plain = next(one for one in vars(home)["BackwardHook"].__mro__ if "lets_clones_go" not in vars(one))
    monkeypatch.setattr(home, "BackwardHook", plain)
    monkeypatch.setattr(modules, "find", lambda path: None)
    net = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
    private.let_graphs_drop([*net], [*net])
    more, (given, _) = _seen_after_steps(net, keep=False)
    assert more > 0
    assert given


def test_hooks_for_all_modules_are_noticed() -> None:
    assert not private.hooks_of_all_modules()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert private.hooks_of_all_modules()
    finally:
        handle.remove()
    assert not private.hooks_of_all_modules()
