"""What was saved before optimizers moved to other files → optimizers that go on from it, with the numbers of then."""

from __future__ import annotations

import gzip
import io
import sys
from pathlib import Path

import pytest
import torch

import torchopt_dist as todist
from tests.rows import each_row

SAVED = Path(__file__).parent / "saved" / "optimizers.pt.gz"
"""For each case pickles, a ``state_dict`` and a ``MetaOptimizer``'s after two steps, and the parameters after three."""
CASES = {
    "SGD": {"lr": 0.05},
    "SGD with momentum": {"lr": 0.05, "momentum": 0.9},
    "SGD with dampening": {"lr": 0.05, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
    "Adam": {"lr": 0.01, "betas": (0.8, 0.95)},
    "Adam with amsgrad": {"lr": 0.02, "betas": (0.8, 0.5), "amsgrad": True},
    "Adam with a schedule": {"lr": todist.schedule.linear_schedule(0.1, 0.0, 4)},
    "AdamW": {"lr": 0.02, "maximize": True},
    "Adamax": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
    "RMSprop": {"lr": 0.01},
    "RMSprop with all": {"lr": 0.01, "alpha": 0.9, "centered": True, "momentum": 0.8},
    "Adagrad": {"lr": 0.05, "lr_decay": 0.1},
    "Adadelta": {"lr": 1.0},
    "Adafactor": {"lr": 0.05},
    "Adan": {"lr": 0.01},
    "Lion": {"lr": 0.01},
    "LAMB": {"lr": 0.01},
    "Muon": {"lr": 0.01},
}


def first_params(name):
    params = [torch.linspace(1, 2, 6).reshape(2, 3), torch.linspace(-1, 1, 2)]
    return params[:1] if name == "Muon" else params


def gradients(params, step):
    return [torch.linspace(-1, 1, p.numel()).reshape(p.shape) * (step + 1) for p in params]


def faces(case):
    """Of an optimizer the function's transformation and the two classes, ready to be given what they move."""
    name, options = case.split(" ")[0], CASES[case]
    impl = getattr(todist, name.lower())(**options)
    return impl, getattr(todist, name), getattr(todist, f"Meta{name}"), options


def step_in_place(optimizer, params, step):
    for p, grad in zip(params, gradients(params, step), strict=True):
        p.grad = grad
    optimizer.step()


def step_of_meta(meta, module, step):
    grads = gradients(list(module), step)
    meta.step(sum((p * grad).sum() for p, grad in zip(module, grads, strict=True)))


def step_of_function(impl, params, state, step):
    updates, state = impl.update(gradients(params, step), state, params=params)
    return [p + u for p, u in zip(params, updates, strict=True)], state


def save():
    """Write the file, by an installation of then: ``python -m tests.optim.test_saved``."""
    saved = {}
    for case in CASES:
        impl, plain, meta_class, options = faces(case)
        moved = first_params(case)
        params = [torch.nn.Parameter(p.clone()) for p in moved]
        module = torch.nn.ParameterList(p.clone() for p in moved)
        optimizer, meta, state = plain(params, **options), meta_class(module, **options), impl.init(moved)
        for step in range(2):
            step_in_place(optimizer, params, step)
            step_of_meta(meta, module, step)
            moved, state = step_of_function(impl, moved, state, step)
        cut = todist.pytree.map_tensors(torch.detach, meta.state_dict()["state"])
        held = {"state": state, "meta": cut, "params": [p.detach().clone() for p in params]}
        if "schedule" not in case:
            held["optimizer"] = optimizer  # with its parameters
        pickled = io.BytesIO()
        torch.save({**held, "state_dict": optimizer.state_dict()}, pickled)
        step_in_place(optimizer, params, 2)
        saved[case] = {"pickled": pickled.getvalue(), "after": [p.detach() for p in params]}
    whole = io.BytesIO()
    torch.save(saved, whole)
    SAVED.write_bytes(gzip.compress(whole.getvalue(), mtime=0))


@pytest.fixture(scope="module")
def saved():
    return torch.load(io.BytesIO(gzip.decompress(SAVED.read_bytes())))


def held_and_after(saved, case):
    return torch.load(io.BytesIO(saved[case]["pickled"]), weights_only=False), saved[case]["after"]


@each_row("case", CASES)
def test_a_state_of_a_function_goes_on(saved, case):
    held, after = held_and_after(saved, case)
    moved, state = step_of_function(faces(case)[0], held["params"], held["state"], 2)
    torch.testing.assert_close(moved, after)
    assert type(state) is type(held["state"])


@each_row("case", [case for case in CASES if "schedule" not in case])
def test_a_pickled_optimizer_goes_on(saved, case):
    held, after = held_and_after(saved, case)
    optimizer = held["optimizer"]
    assert type(optimizer) is faces(case)[1]
    params = optimizer.param_groups[0]["params"]
    step_in_place(optimizer, params, 2)
    torch.testing.assert_close([p.detach() for p in params], after)


@each_row("case", CASES)
def test_a_state_dict_goes_on(saved, case):
    held, after = held_and_after(saved, case)
    _, plain, _, options = faces(case)
    params = [torch.nn.Parameter(p) for p in held["params"]]
    optimizer = plain(params, **options)
    optimizer.load_state_dict(held["state_dict"])
    step_in_place(optimizer, params, 2)
    torch.testing.assert_close([p.detach() for p in params], after)


@each_row("case", CASES)
@each_row("of", ["itself", "the plain class"])
def test_a_meta_optimizer_goes_on(saved, case, of):
    held, after = held_and_after(saved, case)
    _, _, meta_class, options = faces(case)
    module = torch.nn.ParameterList(held["params"])
    meta = meta_class(module, **options)
    meta.load_state_dict({"state": held["meta"]} if of == "itself" else held["state_dict"])
    step_of_meta(meta, module, 2)
    torch.testing.assert_close([p.detach() for p in module], after)


if __name__ == "__main__":
    sys.exit(save())
