"""Every row of ``table.py``, pickled, copied, saved and loaded → it goes on as if it had not been."""

from __future__ import annotations

import copy
import io
import pickle
from functools import partial

import pytest
import torch

import torchopt_dist as todist
from tests.optim.programs import flat, losses, make
from tests.optim.table import CASES, ROWS
from tests.rows import each_row
from torchopt_dist.nn import stop_gradient


def through_pickle(thing):
    return pickle.loads(pickle.dumps(thing))


@each_row("again", [copy.deepcopy, through_pickle])
@each_row("name", ROWS)
def test_transformations_and_optimizers_travel(name, again):
    row = ROWS[name]
    options = list(row.options.values())[-1]
    impl, params = row.function(**options), [torch.ones(2), torch.full((1,), 3.0)]
    one, _ = impl.update(params, impl.init(params), params=params)
    two, _ = again(impl).update(params, impl.init(params), params=params)
    assert all(torch.equal(p, q) for p, q in zip(one, two, strict=True))

    net = make()
    optimizer = row.plain(net.parameters(), **options)
    for loss in losses(torch.float32, count=2):
        loss(net).backward()
        optimizer.step()
    net2, optimizer2 = again((net, optimizer))
    for twin, own in ((net, optimizer), (net2, optimizer2)):
        for loss in losses(torch.float32, count=2):
            own.zero_grad()
            loss(twin).backward()
            own.step()
    assert torch.equal(flat(net.parameters()), flat(net2.parameters()))

    meta_net = make()
    meta = row.meta(meta_net, **options)
    meta2 = again(meta)
    for own in (meta, meta2):
        for loss in losses(torch.float32, count=2):
            own.step(loss(own.modules[0]))
    assert torch.equal(flat(meta_net.parameters()), flat(meta2.modules[0].parameters()))


def through_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)  # `weights_only=True` is its default


@each_row(("name", "setting"), CASES)
def test_a_resumed_run_equals_an_unbroken_one_bit_for_bit(name, setting):
    row = ROWS[name]
    options = row.options[setting]
    net, broken = make(), make()
    optimizer, first = row.plain(net.parameters(), **options), row.plain(broken.parameters(), **options)

    def run(net, optimizer, which):
        for loss in which:
            optimizer.zero_grad()
            loss(net).backward()
            optimizer.step()

    batches = list(losses(torch.float32, options.get("maximize", False), count=12))
    run(net, optimizer, batches)
    run(broken, first, batches[:7])
    resumed = row.plain(broken.parameters(), **options)
    resumed.load_state_dict(through_file(first.state_dict()))
    run(broken, resumed, batches[7:])
    assert torch.equal(flat(net.parameters()), flat(broken.parameters()))

    net, broken = make(), make()
    meta, first = row.meta(net, **options), row.meta(broken, **options)
    for loss in batches:
        meta.step(loss(net))
    for loss in batches[:7]:
        first.step(loss(broken))
    resumed = row.meta(broken, **options)
    resumed.load_state_dict(first.state_dict())
    for loss in batches[7:]:
        resumed.step(loss(broken))
    assert torch.equal(flat(net.parameters()), flat(broken.parameters()))


@each_row("name", [name for name in ROWS if name in dir(torch.optim)])
def test_a_state_of_the_twin_is_taken_over(name):
    row = ROWS[name]
    setting, options = list(row.options.items())[-1]
    net = make()
    twin = row.make_twin(net.parameters(), setting)
    batches = list(losses(torch.float32, options.get("maximize", False), count=10))
    for loss in batches[:5]:
        twin.zero_grad()
        loss(net).backward()
        twin.step()
    other = copy.deepcopy(net)
    ours = row.plain(other.parameters(), **options)
    ours.load_state_dict(copy.deepcopy(twin.state_dict()))  # shares its tensors otherwise
    for each, optimizer in ((net, twin), (other, ours)):
        for loss in batches[5:]:
            optimizer.zero_grad()
            loss(each).backward()
            optimizer.step()
    torch.testing.assert_close(flat(other.parameters()), flat(net.parameters()), rtol=1e-4, atol=1e-6)


@each_row("name", [name for name in ROWS if name != "SGD"])
def test_a_state_of_another_optimizer_and_a_tree_of_another_shape_are_refused(name):
    row = ROWS[name]
    impl = row.function(**next(iter(row.options.values())))
    params = {"a": torch.ones(2)}
    other = todist.sgd(0.1, momentum=0.9)
    with pytest.raises((TypeError, ValueError), match="`state` must be"):
        impl.update(params, other.init(params), params=params)
    with pytest.raises(ValueError, match=r"`state\.\w+` must have the structure of `updates`"):
        impl.update({"b": torch.ones(2)}, impl.init(params), params={"b": torch.ones(2)})


def test_counts_stay_on_the_cpu_where_fused_is_set():
    """Torch moves them to the parameters' device, where each look at one would wait for a GPU."""
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = todist.Adam([p], fused=None)
    p.grad = torch.ones(2)
    optimizer.step()
    saved = optimizer.state_dict()
    saved["param_groups"][0]["fused"] = True
    elsewhere = torch.nn.Parameter(torch.ones(2, device="meta"))
    other = todist.Adam([elsewhere], fused=False)
    other.load_state_dict(saved)
    assert other.param_groups[0]["fused"] is True
    assert saved["param_groups"][0]["fused"] is True  # what was given stays as it is
    step = other.state[elsewhere]["step"]
    assert (step.device.type, step.item()) == ("cpu", 1)


@each_row("dtype", [torch.float64, torch.bfloat16])
@each_row("name", ROWS)
def test_a_state_follows_parameters_that_are_converted(name, dtype):
    """Of the differentiable faces: as of the one in place, whose state is converted as by loading it."""
    row = ROWS[name]
    options = list(row.options.values())[-1]
    plain_net, meta_net = make(), make()
    plain, meta = row.plain(plain_net.parameters(), **options), row.meta(meta_net, **options)
    params = {name: p.detach().clone().requires_grad_() for name, p in make().named_parameters()}
    func = todist.FuncOptimizer(row.function(**options))
    for own in (torch.float32, dtype):
        stop_gradient(meta_net)
        stop_gradient(meta)
        plain_net.to(own)
        meta_net.to(own)
        params = {name: p.to(own) for name, p in params.items()}
        for loss in losses(own, count=2):
            plain.zero_grad()
            loss(plain_net).backward()
            plain.step()
            meta.step(loss(meta_net))
            params = func.step(loss(partial(torch.func.functional_call, make(own), params)), params)
    want = flat(plain_net.parameters())
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float64 else {"rtol": 0.02, "atol": 0.02}
    for got in (flat(meta_net.parameters()), flat(params.values())):
        assert got.dtype is dtype
        torch.testing.assert_close(got, want, **tolerance)
    kept = plain.state[next(plain_net.parameters())]
    wide = {value.dtype for key, value in kept.items() if key != "step" and value.ndim}
    for held in (meta.state_dict()["state"][0], func.state_dict()["state"]):
        assert {value.dtype for value in held.values() if value.ndim} == wide


@each_row("way", ["to", "set_states", "load_state_dict"])
def test_a_converted_state_stays_in_the_graph(way):
    """By hand: ``m = 2 w`` at the first step, and ``w - 0.25 (2 w + 0.5 m)`` at the second, in double precision."""
    w = torch.tensor([1.0, 3.0], requires_grad=True)
    optimizer = todist.FuncOptimizer(todist.sgd(0.25, momentum=0.5))
    optimizer.step((w**2).sum(), (w,))
    states, saved = optimizer.get_states(), optimizer.state_dict()
    v = w.double()
    if way == "set_states":
        optimizer.step((v**2).sum(), (v,))
        optimizer.set_states(states)
    elif way == "load_state_dict":
        optimizer = todist.FuncOptimizer(todist.sgd(0.25, momentum=0.5))
        optimizer.load_state_dict(saved)
    (moved,) = optimizer.step((v**2).sum(), (v,))
    torch.testing.assert_close(moved, 0.25 * v)
    torch.testing.assert_close(torch.autograd.grad(moved.sum(), w)[0], torch.full((2,), 0.25))
    assert optimizer.get_states()[0][1].momentum_buffer[0].dtype is torch.float64


@each_row("cls", [torch.optim.Adam, torch.optim.SGD])
def test_the_state_of_a_formula_of_torch_follows_its_module(cls):
    net = make()
    optimizer = todist.differentiable(
        cls, net, lr=0.1, **({"momentum": 0.9} if cls is torch.optim.SGD else {})
    )
    for dtype in (torch.float32, torch.float64):
        stop_gradient(net)
        stop_gradient(optimizer)
        net.to(dtype)
        optimizer.step(next(losses(dtype))(net))
        assert {x.dtype for x in optimizer.state_dict()["state"][0].values() if x.ndim} == {dtype}


def test_a_module_stays_real_or_complex():
    net = torch.nn.Linear(2, 1)
    optimizer = todist.MetaAdam(net)
    for _ in range(2):  # the failed step leaves the state alone
        for parameter in net.parameters():
            parameter.data = parameter.data.to(torch.complex64)
        x = torch.ones(1, 2, dtype=torch.complex64)
        message = r"stay real or complex: 1/exp_avg/.* has torch\.float32, .* needs torch\.complex64 now"
        with pytest.raises(ValueError, match=message):
            optimizer.step(net(x).real.sum())
