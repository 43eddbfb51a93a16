"""Programs and packages that are built on TorchOpt: its modules, the layout of its states, a whole environment."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
import torch

import torchopt_dist as todist
from tests.processes import PROGRAMS, ROOT, python
from tests.rows import each_row
from torchopt_dist import compat as torchopt
from torchopt_dist import pytree, transform

OPTIMIZERS = ("adadelta", "adagrad", "adam", "adamax", "adamw", "radam", "rmsprop", "sgd")
LINKS = (
    *("add_decayed_weights", "nan_to_num", "scale", "scale_by_adadelta", "scale_by_adam", "scale_by_adamax"),
    *("scale_by_radam", "scale_by_rms", "scale_by_rss", "scale_by_schedule", "scale_by_stddev", "trace"),
)

MODULES = f"""
from torchopt_dist import compat

compat.install()
import importlib

import torchopt

names = '''accelerated_op alias alias.utils base clip combine hook update utils version visual typing pytree
distributed distributed.api distributed.autograd distributed.world linalg linalg.cg linalg.ns
linalg.utils linear_solve linear_solve.cg linear_solve.inv linear_solve.normal_cg linear_solve.utils
nn nn.module nn.stateless optim optim.base optim.func optim.func.base optim.meta optim.meta.base
schedule schedule.exponential_decay schedule.polynomial transform transform.utils
diff.implicit.decorator diff.implicit.nn.module diff.zero_order.decorator diff.zero_order.nn.module'''.split()
optimizers, links = {OPTIMIZERS}, {LINKS}
names += [f"{{where}}.{{name}}" for where in ("alias", "optim", "optim.meta") for name in optimizers]
names += [f"transform.{{name}}" for name in links]
assert type(torchopt.alias.sgd) is type(importlib.import_module), "before an import of torchopt.alias.sgd"
for name in names:
    module = importlib.import_module(f"torchopt.{{name}}")
    assert module.__name__ == f"torchopt.{{name}}"

import torch
import torchopt.alias.adam as adam
from torchopt.alias.adamw import adamw
from torchopt.linalg.cg import cg
from torchopt.nn.module import MetaGradientModule
from torchopt.optim.sgd import SGD
from torchopt.transform.scale_by_stddev import scale_by_stddev
from torchopt.transform.utils import inc_count, tree_map_flat, tree_map_flat_, update_moment

# A function and its module have one name, and the function is what the package shows.
assert adam is torchopt.adam and torchopt.alias.adamw is adamw is torchopt.adamw
assert torchopt.linalg.cg is cg and torchopt.schedule.exponential_decay(0.1, 0.9)
assert all(getattr(torchopt.transform, name).flat is getattr(torchopt.transform, name) for name in links)
assert torchopt.optim.adam.Adam is torchopt.Adam and torchopt.optim.sgd.SGD is SGD is torchopt.SGD
assert MetaGradientModule is torchopt.nn.MetaGradientModule and scale_by_stddev is torchopt.transform.scale_by_stddev

one = torch.ones(2)
assert inc_count([one, None], [1, 1]) == [2, 1]
assert tree_map_flat(lambda x, y: x + y, [1, None], [2, 3]) == [3, None]
given = [one.clone(), None]
assert tree_map_flat_(lambda x: x.mul_(2), given) is given and given[0].tolist() == [2, 2]
for inplace in (True, False):
    had = [one.clone(), one]
    new = update_moment([3 * one, None], had, 0.5, order=2, inplace=inplace)
    assert new[0].tolist() == [5, 5] and new[1] is one and (new[0] is had[0]) is inplace
"""


def test_every_module_of_torchopt_can_be_imported() -> None:
    ended = python("-c", MODULES)
    assert ended.returncode == 0, ended.stderr


@pytest.fixture
def params() -> dict[str, torch.Tensor]:
    return {"b": torch.full((2,), 2.0), "a": torch.full((3,), 3.0)}


def test_states_answer_to_torchopts_names_in_the_order_of_sorted_keys(
    params: dict[str, torch.Tensor],
) -> None:
    for name, first in itertools.product(("adam", "adamw", "sgd"), (True, False)):
        optimizer = getattr(torchopt, name)(0.1, **({"momentum": 0.9} if name == "sgd" else {}))
        state = optimizer.init(params)
        if not first:
            state = optimizer.update(params, state, params=params)[1]
        own = state[0]
        lists = [own.trace] if name == "sgd" else [own.mu, own.nu]
        for tensors in lists:
            assert type(tensors) is list
            assert [x.shape for x in tensors] == [(3,), (2,)]
        if name != "sgd":
            assert own.mu[0] is own.exp_avg["a"], "the state's own tensors, which may be written to"
            assert [(x.dtype, int(x)) for x in own.count] == [(torch.int64, int(not first))] * 2
    links = {
        transform.scale_by_adamax(): ("mu", "nu", "count"),
        transform.scale_by_adam(amsgrad=True): ("mu", "nu", "count"),
        transform.scale_by_radam(): ("mu", "nu", "count"),
        transform.scale_by_rms(): ("nu",),
        transform.scale_by_stddev(): ("mu", "nu"),
    }
    for link, names in links.items():
        own = link.init(params)
        assert all(len(getattr(own, name)) == 2 for name in names)
        assert len({id(getattr(own, name)[0]) for name in names}) == len(names)
    assert [int(x) for x in transform.scale_by_schedule(float).init(params).count] == [0]


def test_an_optimizer_that_begins_with_its_memory_gives_the_same_steps(
    params: dict[str, torch.Tensor],
) -> None:
    for name, options in {"adam": {}, "adamw": {}, "sgd": {"momentum": 0.9}}.items():
        one, other = getattr(torchopt, name)(0.1, **options), getattr(todist, name)(0.1, **options)
        assert one.fused_step == other.fused_step
        ends = []
        for impl in (one, other):
            state = impl.init(params)
            for _ in range(3):
                updates, state = impl.update(params, state, params=params)
            ends.append(updates)
        torch.testing.assert_close(*ends)
        penalized = getattr(torchopt, name)(0.1, weight_decay=0.5, **options)
        assert len(penalized.init(params)) == len(getattr(todist, name)(0.1, **options).init(params)) - (
            name == "adamw"
        )


def _doubling(updates: Any, state: Any, *, params: Any = None, inplace: bool = True) -> Any:
    assert type(updates) is type(params) is list
    return tuple(None if x is None else x + y for x, y in zip(updates, params, strict=True)), state + 1


def test_a_flat_chain_gives_lists_to_foreign_links_only(params: dict[str, torch.Tensor]) -> None:
    foreign = transform.GradientTransformation(len, _doubling)
    impl = torchopt.chain.flat(torchopt.sgd(1.0, momentum=0.5), torchopt.chain(foreign))
    state = impl.init(params)
    assert state[-1] == 2
    updates, state = impl.update({"a": params["a"], "b": None}, state, params=params)
    assert state[-1] == 3
    assert updates["b"] is None
    assert updates["a"].tolist() == [0.0] * 3
    own = torchopt.adamw(0.1)
    flat = torchopt.chain_flat(own)
    assert flat.transformations == own.transformations
    assert flat.fused_step == own.fused_step, "whole steps of ours stay whole"


@each_row("name", OPTIMIZERS)
def test_lists_and_tuples_are_interchangeable(name: str) -> None:
    impl = getattr(torchopt, name)(0.1, **({"momentum": 0.9} if name == "sgd" else {}))
    ones = [torch.ones(2), {"a": torch.ones(3)}]
    found = []
    for first, second in itertools.product((list, tuple), repeat=2):
        updates, state = impl.update(second(ones), impl.init(first(ones)), params=first(ones))
        assert type(updates) is second
        found.append(torchopt.apply_updates(first(ones), updates, inplace=False))
        assert type(found[-1]) is first
        impl.update(first(ones), state, params=second(ones))
    torch.testing.assert_close([list(x) for x in found], [list(found[0])] * 4)
    with pytest.raises(ValueError, match="must have the structure of"):
        torchopt.apply_updates(ones, {"a": torch.ones(2), "b": torch.ones(3)})


LINKS_WITH_STATE = {
    **{name: getattr(todist, name) for name in OPTIMIZERS},
    "momentum": lambda lr: todist.sgd(lr, momentum=0.9, dampening=0.1),
    "centered": lambda lr: todist.rmsprop(lr, centered=True, momentum=0.9),
    "amsgrad": lambda lr: todist.adam(lr, amsgrad=True),
    "formula": lambda lr: todist.adam(lr, fused=False),
    "scheduled": lambda lr: todist.adam(lambda step: lr / (1 + step)),
    "adan": todist.adan,
    "lion": todist.lion,
}


@each_row(
    ("name", "dtype"),
    [
        (name, dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.complex64)
        for name in LINKS_WITH_STATE
        if not (dtype.is_complex and name == "adan")  # which has no complex numbers
    ],
)
def test_inplace_overwrites_all_of_the_state_or_nothing(name: str, dtype: torch.dtype) -> None:
    impl = LINKS_WITH_STATE[name](0.1)
    params, grads = {"a": torch.ones(2, dtype=dtype)}, {"a": torch.full((2,), 3.0, dtype=dtype)}

    def tensors(state: object) -> list[torch.Tensor]:
        return [x for x in pytree.flatten(state)[0] if isinstance(x, torch.Tensor)]

    for inplace, record in itertools.product((True, False), repeat=2):
        state = impl.init(params)
        before = [x.clone() for x in tensors(state)]
        with torch.set_grad_enabled(record):
            updates, new = impl.update(grads, state, params=params, inplace=inplace)
        if inplace and not record:
            assert all(x is y for x, y in zip(tensors(state), tensors(new), strict=True))
        else:
            torch.testing.assert_close(tensors(state), before)
            assert not {id(x) for x in tensors(state)} & {id(x) for x in tensors(new)}
        again, expected = impl.update(grads, impl.init(params), params=params)
        torch.testing.assert_close([updates, tensors(new)], [again, tensors(expected)])


def test_inplace_overwrites_nothing_of_a_state_that_a_vmap_shares() -> None:
    impl = todist.adamw(0.1)
    w = torch.ones(3)
    state = impl.init(w)
    with torch.no_grad():
        made = torch.func.vmap(lambda g: impl.update(g, state, params=w, inplace=True)[0])(torch.ones(2, 3))
    assert made.shape == (2, 3)
    assert not any(bool(x.any()) for x in pytree.flatten(state)[0])


@pytest.mark.nightly
def test_an_environment_in_which_torchopt_is_torchopt_dist(tmp_path: Path) -> None:
    venv.create(tmp_path, with_pip=False, symlinks=True)
    interpreter = tmp_path / "bin" / "python"
    [site] = tmp_path.glob("lib/python*/site-packages")
    # The packages that this Python has, and, beside them, what is not ours.
    (site / "packages.pth").write_text("\n".join([str(ROOT), *(x for x in sys.path if "packages" in x)]))
    (site / "torchopt").mkdir()
    (site / "torchopt" / "__init__.py").write_text("raise ImportError('TorchOpt itself')\n")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env["OMP_NUM_THREADS"] = "1"

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [str(interpreter), *map(str, arguments)]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)

    installed = run("-m", "torchopt_dist.compat", "--install")
    assert installed.returncode == 0, installed.stderr
    assert f"`import torchopt` means torchopt_dist for {interpreter}" in installed.stdout
    ended = run(PROGRAMS / "heir.py", "adamw", "signs")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["adamw 9", "signs 3"]
    assert run("-m", "torchopt_dist.compat", "--uninstall").returncode == 0
    assert "TorchOpt itself" in run("-c", "import torchopt").stderr
    assert sorted(x.name for x in site.glob("*compat*")) == []


def test_an_environment_that_cannot_be_changed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path / "nothing"))
    with pytest.raises(SystemExit, match=r"torchopt_dist_compat.pth must be writable, got: .*No such file"):
        torchopt.main(["--install"])


def test_a_program_of_metagradients_and_its_children() -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ended = python(
        "-m", "torchopt_dist.compat", PROGRAMS / "heir.py", "sgd", "scheduled", warm=False, env=env
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["sgd 3", "scheduled 9"]
