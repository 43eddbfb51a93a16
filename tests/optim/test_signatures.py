"""Every row of ``table.py`` → one signature, one text and one set of errors for its function and its classes."""

from __future__ import annotations

import inspect

import pytest
import torch

import torchopt_dist as todist
from tests.optim.programs import make
from tests.optim.table import ROWS
from tests.rows import each_row
from torchopt_dist.ops import library
from torchopt_dist.optim import _signatures as signatures


@each_row("name", ROWS)
def test_the_three_faces_share_one_signature_and_one_text(name):
    row = ROWS[name]
    function, plain, meta = (inspect.signature(f).parameters for f in (row.function, row.plain, row.meta))
    assert list(plain) == ["params", *[key for key in function if key != "moment_requires_grad"]]
    assert list(meta) == ["module", *function]
    for key in list(plain)[1:]:
        assert f"\n    {key}: " in row.plain.__doc__
        assert f"\n    {key}: " in row.meta.__doc__
    assert row.plain.__module__ == row.meta.__module__ == "torchopt_dist.optim.classes"
    assert row.function.__module__.startswith("torchopt_dist.transform.")  # with its link and its formula


@each_row("name", ROWS)
def test_bad_numbers_are_refused_by_every_face(name):
    row = ROWS[name]
    net = make()
    faces = (row.function, lambda **kw: row.plain(net.parameters(), **kw), lambda **kw: row.meta(net, **kw))
    good = next(iter(row.options.values()))
    bad = {"lr": -1.0, "weight_decay": -0.5, "eps": -1e-8, "momentum": -1.0, "alpha": 1.5, "rho": -0.1}
    bad |= {"lr_decay": -1.0, "initial_accumulator_value": -1.0, "initial_scale": -1.0, "eps_root": -1.0}
    known = inspect.signature(row.function).parameters
    for key in bad.keys() & known.keys():
        for face in faces:
            with pytest.raises(ValueError, match=rf"`{key}` must be at least 0.*, got {bad[key]}"):
                face(**{**good, key: bad[key]})
            with pytest.raises(TypeError, match=f"`{key}` must be a number.*, got str"):
                face(**{**good, key: "much"})
    if "betas" in known:
        count = len(row.tensors["betas"])
        for place in range(count):
            betas = [0.5] * count
            betas[place] = 1.0
            for face in faces:
                with pytest.raises(
                    ValueError, match=rf"`betas\[{place}\]` must be at least 0 and below 1, got 1"
                ):
                    face(**{**good, "betas": tuple(betas)})
                with pytest.raises(TypeError, match=f"`betas` must be a tuple of {count} decays"):
                    face(**{**good, "betas": 0.9})


def test_fused_has_one_name_and_tells_the_truth(monkeypatch):
    params = [torch.ones(2)]
    with pytest.raises(TypeError, match="use_accelerated_op"):
        todist.adam(use_accelerated_op=True)
    with pytest.raises(TypeError, match=r"Adam: .*use_accelerated_op"):
        todist.Adam(params, use_accelerated_op=True)
    monkeypatch.setattr(library, "_KERNELS", frozenset())  # a build without any
    impl = todist.adam(fused=True)
    with pytest.raises(RuntimeError, match=r"`fused=True` cannot be used: .*adam"):
        impl.update(params, impl.init(params))
    w = torch.ones(2, requires_grad=True)
    w.sum().backward()
    todist.Adam([w], fused=True).step()  # torch's own step
    assert w.tolist() == pytest.approx([1 - 1e-3] * 2)
    with pytest.raises(RuntimeError, match=r"`fused=True` cannot be used: .*adam"):
        todist.Adam([w], eps_root=0.1, fused=True).step()  # torch's has no `eps_root`


@each_row(
    ("args", "kwargs"), [((0.1,), {}), ((0.1, 0.9), {"fused": False}), ((), {"maximize": True, "lr": 0.2})]
)
def test_arguments_are_bound_as_inspect_binds_them(args, kwargs):
    signature = inspect.signature(todist.MetaSGD)
    bound = signature.bind(None, *args, **kwargs)
    bound.apply_defaults()
    expected = dict(list(bound.arguments.items())[1:])
    found = signatures.bind(todist.MetaSGD, signature, None, args, kwargs)
    assert list(found.items()) == list(expected.items())


def needs_rate(lr):
    return todist.sgd(lr)


class NeedsRate(todist.Optimizer, transformation=needs_rate):
    pass


@each_row(
    ("made", "args", "kwargs"),
    [
        (NeedsRate, (), {}),
        (todist.MetaSGD, (0.1, 0.9, 0.0, 0.0, False, True), {}),
        (todist.MetaSGD, (0.1,), {"lr": 0.1}),
        (todist.MetaSGD, (0.1,), {"rate": 1.0}),
    ],
)
def test_arguments_that_inspect_refuses_are_refused(made, args, kwargs):
    with pytest.raises(TypeError, match=rf"{made.__name__}: .*argument"):
        signatures.bind(made, inspect.signature(made), None, args, kwargs)
