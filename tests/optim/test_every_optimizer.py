"""What every optimizer must do, run for every row of ``table.py``."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

import torchopt_dist as todist
from tests.optim.graph import count_nodes
from tests.optim.table import CASES, ROWS
from torchopt_dist.ops import library
from torchopt_dist.optim import FuncOptimizer, apply_updates

DOUBLE = torch.float64


class Complex(nn.Module):
    """A network of complex numbers that ``nn.Linear`` does not warn about."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(s, dtype=torch.complex64) / 2) for s in ((3, 4), (4, 1)))

    def forward(self, x):
        h = torch.view_as_complex(torch.tanh(torch.view_as_real(x @ self.a)))  # tanh itself has poles
        return h @ self.b


def make(dtype=torch.float32):
    torch.manual_seed(0)
    if dtype.is_complex:
        return Complex()
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)


def losses(dtype, maximize=False, count=50):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        x = torch.randn(5, 3, generator=generator, dtype=DOUBLE).to(dtype)

        def loss(forward, x=x):
            value = (forward(x) - x.sum(1, keepdim=True)).abs().square().mean()
            return -value if maximize else value

        yield loss


def flat(params):
    return torch.cat([p.detach().flatten() for p in params])


def tolerance(dtype):
    return {
        DOUBLE: {"rtol": 1e-10, "atol": 1e-11},
        torch.float32: {"rtol": 2e-4, "atol": 2e-5},
        torch.complex64: {"rtol": 2e-4, "atol": 2e-5},
        torch.bfloat16: {"rtol": 0.06, "atol": 0.06},
    }[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE, torch.complex64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "setting"), CASES)
def test_fifty_steps_equal_the_twin(name, setting, dtype):
    row = ROWS[name]
    options = row.options[setting]
    start = make(dtype)
    twin, ours, generic = copy.deepcopy(start), copy.deepcopy(start), copy.deepcopy(start)
    optimizers = [
        (twin, row.make_twin(twin.parameters(), setting)),
        (ours, row.plain(ours.parameters(), **options)),
        (generic, todist.Optimizer(generic.parameters(), todist.chain(row.function(**options)))),
    ]
    for loss in losses(dtype, options.get("maximize", False)):
        for net, optimizer in optimizers:
            optimizer.zero_grad()
            loss(net).backward()
            optimizer.step()
    moved = (flat(twin.parameters()) - flat(start.parameters())).abs().max()
    assert moved > 0.05
    for net in (ours, generic):  # the whole step at once, and link by link
        torch.testing.assert_close(flat(net.parameters()), flat(twin.parameters()), **tolerance(dtype))


@pytest.mark.parametrize(("name", "setting"), CASES)
def test_functional_and_meta_equal_the_class(name, setting):
    row = ROWS[name]
    options = row.options[setting]
    plain, meta, functional, overwritten = (make(DOUBLE) for _ in range(4))
    optimizer = row.plain(plain.parameters(), **options)
    meta_optimizer = row.meta(meta, **options)
    func_optimizer = FuncOptimizer(row.function(**options))
    in_place = FuncOptimizer(row.function(**options), inplace=True)
    params, held = dict(functional.named_parameters()), dict(overwritten.named_parameters())

    def call(net, params):
        return lambda x: torch.func.functional_call(net, params, (x,))

    for loss in losses(DOUBLE, options.get("maximize", False), count=12):
        optimizer.zero_grad()
        loss(plain).backward()
        optimizer.step()
        meta_optimizer.step(loss(meta))
        params = func_optimizer.step(loss(call(functional, params)), params)
        in_place.step(loss(call(overwritten, held)), held)
    want = flat(plain.parameters())
    for got in (meta.parameters(), params.values(), held.values()):
        torch.testing.assert_close(flat(got), want, rtol=1e-10, atol=1e-11)


def unroll(row, params, hyper, grad_of, steps=3):
    """Parameters after some functional steps."""
    impl = row.function(**hyper)
    state = impl.init(params)
    for _ in range(steps):
        updates, state = impl.update(grad_of(params), state, params=params, inplace=False)
        params = apply_updates(params, updates, inplace=False)
    return params


def inner_loss(params):
    a, b = params
    return (a.sin() * b).sum() + 0.3 * a.pow(3).sum() + 0.5 * b.pow(2).sum()


def recorded_grad(params):
    return torch.autograd.grad(inner_loss(params), params, create_graph=True)


@pytest.mark.parametrize(("name", "setting"), CASES)
def test_first_and_second_derivatives_through_three_steps(name, setting):
    row = ROWS[name]
    options = dict(row.options[setting])
    if "eps" in inspect.signature(row.function).parameters:
        options["eps"] = 0.05  # finite differences must see the bend at 0
    torch.manual_seed(3)
    a, b = (torch.randn(2, dtype=DOUBLE, requires_grad=True) for _ in range(2))

    def after(a, b):
        return tuple(unroll(row, (a, b), options, recorded_grad))

    assert gradcheck(after, (a, b))
    assert gradgradcheck(after, (a, b), atol=1e-4)


@pytest.mark.parametrize("name", ROWS)
def test_every_hyper_parameter_as_a_tensor_gets_its_gradient(name):
    row = ROWS[name]
    names, numbers = [], []
    for key, value in row.tensors.items():
        for place, number in enumerate(value if isinstance(value, tuple) else (value,)):
            names.append((key, place if isinstance(value, tuple) else None))
            numbers.append(torch.tensor(number, dtype=DOUBLE, requires_grad=True))
    torch.manual_seed(3)
    params = tuple(torch.randn(2, dtype=DOUBLE, requires_grad=True) for _ in range(2))

    def after(*values):
        hyper = {}
        for (key, place), value in zip(names, values, strict=True):
            hyper[key] = value if place is None else (*hyper.get(key, ()), value)
        return tuple(unroll(row, params, hyper, recorded_grad, steps=7 if name == "RAdam" else 3))

    assert len(names) >= 4
    assert gradcheck(after, numbers)
    assert gradgradcheck(after, numbers, atol=1e-4)
    # and the values are those of plain numbers
    want = unroll(row, params, row.tensors, recorded_grad, steps=7 if name == "RAdam" else 3)
    torch.testing.assert_close(after(*numbers), tuple(want), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("name", "setting"), CASES)
def test_meta_gradients_are_finite_where_an_inner_gradient_is_zero(name, setting):
    row = ROWS[name]
    w = nn.Linear(2, 1, bias=False).double()
    x = torch.tensor([[1.0, 0.0]], dtype=DOUBLE)  # the second weight's gradient is exactly 0
    first = w.weight
    scale = torch.tensor(1.0, dtype=DOUBLE, requires_grad=True)
    optimizer = row.meta(w, **row.options[setting])
    for _ in range(3):
        optimizer.step((scale * w(x)).square().sum())
    gradient, of_scale = torch.autograd.grad(w(x).square().sum() + w.weight[0, 1] ** 2, (first, scale))
    assert gradient.isfinite().all()
    assert of_scale.isfinite()
    decay = row.options[setting].get("weight_decay", 0.01 if name == "AdamW" else 0)
    if not decay:  # the second weight stays where it is
        torch.testing.assert_close(gradient[0, 1], 2 * first.detach()[0, 1])


@pytest.mark.parametrize("name", ROWS)
def test_vmap_and_func_grad(name):
    row = ROWS[name]
    hyper = {**next(iter(row.options.values()))}
    if "eps" in inspect.signature(row.function).parameters:
        hyper["eps"] = 0.05

    def outer(a, b):
        moved = unroll(row, (a, b), hyper, torch.func.grad(inner_loss), steps=7 if name == "RAdam" else 2)
        return sum(p.square().sum() for p in moved)

    torch.manual_seed(5)
    a, b = torch.randn(3, 2, dtype=DOUBLE), torch.randn(3, 2, dtype=DOUBLE)
    batched = torch.func.vmap(torch.func.grad(outer, argnums=(0, 1)))(a, b)
    for task in range(3):
        one = (a[task].clone().requires_grad_(), b[task].clone().requires_grad_())
        moved = unroll(row, one, hyper, recorded_grad, steps=7 if name == "RAdam" else 2)
        want = torch.autograd.grad(sum(p.square().sum() for p in moved), one)
        for got, expected in zip(batched, want, strict=True):
            torch.testing.assert_close(got[task], expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ROWS)
def test_update_compiles_without_a_graph_break(name):
    row = ROWS[name]
    impl = row.function(**list(row.options.values())[-1])
    params = {"a": torch.randn(3), "b": torch.randn(2, 2)}
    grads = [{name: torch.randn_like(p) for name, p in params.items()} for _ in range(3)]
    states, out = [impl.init(params), impl.init(params)], []

    def update(grads, state, params):
        return impl.update(grads, state, params=params, inplace=False)

    compiled = torch.compile(update, fullgraph=True, backend="eager")
    for grad in grads:
        for place, function in enumerate((update, compiled)):
            updates, states[place] = function(grad, states[place], params)
            out.append(updates)
    for want, got in zip(out[::2], out[1::2], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    torch.compiler.reset()


@pytest.mark.parametrize("name", ROWS)
def test_the_class_compiles(name):
    row = ROWS[name]
    options = list(row.options.values())[-1]
    nets = [make(), make()]
    optimizers = [row.plain(net.parameters(), **options) for net in nets]
    steps = [optimizers[0].step, torch.compile(optimizers[1].step, backend="eager")]
    for loss in losses(torch.float32, options.get("maximize", False), count=3):
        for net, step in zip(nets, steps, strict=True):
            net.zero_grad()
            loss(net).backward()
            step()
    torch.testing.assert_close(flat(nets[1].parameters()), flat(nets[0].parameters()), rtol=1e-4, atol=1e-6)
    torch.compiler.reset()


def through_pickle(thing):
    return pickle.loads(pickle.dumps(thing))


@pytest.mark.parametrize("again", [copy.deepcopy, through_pickle])
@pytest.mark.parametrize("name", ROWS)
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


@pytest.mark.parametrize(("name", "setting"), CASES)
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


@pytest.mark.parametrize("name", [name for name in ROWS if name in dir(torch.optim)])
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


@pytest.mark.parametrize(("name", "setting"), CASES)
def test_a_parameter_without_gradient_is_skipped_as_in_torch(name, setting):
    row = ROWS[name]
    options = row.options[setting]
    start = [torch.tensor([1.0, -2.0], dtype=DOUBLE), torch.tensor([0.5], dtype=DOUBLE)]
    columns = []
    for twin in (True, False):
        params = [p.clone().requires_grad_() for p in start]
        optimizer = row.make_twin(params, setting) if twin else row.plain(params, **options)
        for step in range(6):
            optimizer.zero_grad()
            loss = params[0].pow(2).sum() + (params[1].pow(3).sum() if step % 3 else 0)
            loss.backward()
            optimizer.step()
        columns.append(flat(params))
    torch.testing.assert_close(columns[1], columns[0], rtol=1e-10, atol=1e-11)

    impl = row.function(**options)
    params = {"a": start[0], "b": start[1]}
    updates, state = impl.update(params, impl.init(params), params=params, inplace=False)
    updates, after = impl.update({"a": start[0], "b": None}, state, params=params, inplace=False)
    assert updates["b"] is None
    kept = [
        (todist.pytree.flatten(s)[0], todist.pytree.flatten(t)[0]) for s, t in zip(state, after, strict=True)
    ]
    assert sum(x is y for before, later in kept for x, y in zip(before, later, strict=True)) >= len(
        [link for link in after if link]
    ) - (name == "SGD" and setting == "plain")


@pytest.mark.parametrize("name", ROWS)
def test_gradients_are_only_read_and_memory_holds_no_graph(name):
    row = ROWS[name]
    for options in row.options.values():
        net = make()
        optimizer = row.plain(net.parameters(), **options)
        for loss in losses(torch.float32, count=3):
            optimizer.zero_grad()
            loss(net).backward()
            held = [(p.grad, p.grad.clone()) for p in net.parameters()]
            optimizer.step()
            for p, (grad, before) in zip(net.parameters(), held, strict=True):
                assert p.grad is grad
                assert torch.equal(grad, before)
        tensors = [v for state in optimizer.state.values() for v in state.values()]
        assert count_nodes(*(t for t in tensors if isinstance(t, torch.Tensor))) == 0


@pytest.mark.parametrize("name", ROWS)
def test_the_graph_stays_flat_over_a_thousand_cut_steps(name):
    row = ROWS[name]
    options = list(row.options.values())[-1]
    net = nn.Linear(2, 1, bias=False)
    optimizer = row.meta(net, **options)
    x, sizes = torch.randn(3, 2), []
    for step in range(1000):
        optimizer.step(net(x).square().mean())
        if step in (9, 999):
            state = todist.pytree.flatten(optimizer.get_states())[0]
            sizes.append(count_nodes(net.weight, *(t for t in state if isinstance(t, torch.Tensor))))
        todist.stop_gradient(net)
        todist.stop_gradient(optimizer)
    assert sizes[0] == sizes[1] > 0


@pytest.mark.parametrize("name", ROWS)
def test_the_three_faces_share_one_signature_and_one_text(name):
    row = ROWS[name]
    function, plain, meta = (inspect.signature(f).parameters for f in (row.function, row.plain, row.meta))
    assert list(plain) == ["params", *[key for key in function if key != "moment_requires_grad"]]
    assert list(meta) == ["module", *function]
    for key in list(plain)[1:]:
        assert f"\n    {key}: " in row.plain.__doc__
        assert f"\n    {key}: " in row.meta.__doc__
        if row.plain.__module__ != row.function.__module__:
            raise AssertionError("an optimizer is one file")


@pytest.mark.parametrize("name", ROWS)
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


@pytest.mark.parametrize("name", [name for name in ROWS if name != "SGD"])
def test_a_state_of_another_optimizer_and_a_tree_of_another_shape_are_refused(name):
    row = ROWS[name]
    impl = row.function(**next(iter(row.options.values())))
    params = {"a": torch.ones(2)}
    other = todist.sgd(0.1, momentum=0.9)
    with pytest.raises((TypeError, ValueError), match="`state` must be"):
        impl.update(params, other.init(params), params=params)
    with pytest.raises(ValueError, match=r"`state\.\w+` must have the structure of `updates`"):
        impl.update({"b": torch.ones(2)}, impl.init(params), params={"b": torch.ones(2)})


def test_double_precision_is_exact_in_the_first_step():
    """Adam's first step is ``lr * g / (|g| + eps)``: corrections in single precision are 7e-6 off."""
    w = torch.tensor([2.0], dtype=DOUBLE, requires_grad=True)
    (0.3 * w).sum().backward()
    todist.Adam([w], lr=0.1).step()
    assert w.item() == pytest.approx(2.0 - 0.1 * 0.3 / (0.3 + 1e-8), rel=1e-15)


def test_adamw_mask_and_groups():
    net = make()
    mask = [p.ndim > 1 for p in net.parameters()]
    ours = todist.AdamW(net.parameters(), 0.01, weight_decay=0.5, mask=mask)
    twin_net = make()
    matrices, biases = [], []
    for p in twin_net.parameters():
        (matrices if p.ndim > 1 else biases).append(p)
    twin = torch.optim.AdamW(
        [{"params": matrices}, {"params": biases, "weight_decay": 0.0}], 0.01, weight_decay=0.5
    )
    grouped_net = make()
    matrices = [p for p in grouped_net.parameters() if p.ndim > 1]
    biases = [p for p in grouped_net.parameters() if p.ndim == 1]
    grouped = todist.AdamW(
        [{"params": matrices}, {"params": biases, "weight_decay": 0.0}], 0.01, weight_decay=0.5
    )
    for loss in losses(torch.float32, count=10):
        for each, optimizer in ((net, ours), (twin_net, twin), (grouped_net, grouped)):
            optimizer.zero_grad()
            loss(each).backward()
            optimizer.step()
    for each in (net, grouped_net):
        torch.testing.assert_close(flat(each.parameters()), flat(twin_net.parameters()), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("centered", [False, True])
def test_what_rmsprop_has_beyond_torch(centered, fused):
    w = torch.tensor([1.0, -2.0], dtype=DOUBLE, requires_grad=True)
    options = {
        "lr": 0.1,
        "alpha": 0.9,
        "eps": 1e-3,
        "momentum": 0.8,
        "centered": centered,
        "initial_scale": 0.5,
    }
    optimizer = todist.RMSprop([w], **options, nesterov=True, fused=fused)
    (meta,) = unroll(
        SimpleNamespace(function=todist.rmsprop),
        (w.detach(),),
        {**options, "nesterov": True},
        lambda p: (p[0] ** 3,),
    )
    x, v, a, b = w.detach().clone(), 0.5, 0.0, 0.0
    for _ in range(3):
        w.grad = w.detach() ** 3
        optimizer.step()
        g = x**3
        v, a = 0.9 * v + 0.1 * g**2, 0.9 * a + 0.1 * g
        step = g / ((v - a**2 if centered else v) ** 0.5 + 1e-3)
        b = 0.8 * b + step
        x = x - 0.1 * (step + 0.8 * b)
    torch.testing.assert_close(w.detach(), x, rtol=1e-12, atol=0)
    torch.testing.assert_close(meta, x, rtol=1e-12, atol=0)


def test_fused_has_two_names_and_tells_the_truth(monkeypatch):
    params = [torch.ones(2)]
    with pytest.raises(ValueError, match="another name for `fused`: give one of them"):
        todist.adam(fused=True, use_accelerated_op=True)
    monkeypatch.setattr(library, "_KERNELS", frozenset())  # a build without any
    for options in ({"fused": True}, {"use_accelerated_op": True}):
        impl = todist.adam(**options)
        with pytest.raises(RuntimeError, match=r"`fused=True` cannot be kept: .*adam"):
            impl.update(params, impl.init(params))
        w = torch.ones(2, requires_grad=True)
        w.sum().backward()
        with pytest.raises(RuntimeError, match=r"`fused=True` cannot be kept: .*adam"):
            todist.Adam([w], **options).step()


@pytest.mark.parametrize("name", ROWS)
def test_grad_scaler_and_schedulers(name):
    row = ROWS[name]
    setting, options = next(iter(row.options.items()))
    nets = [make(), make()]
    optimizers = [row.plain(nets[0].parameters(), **options), row.make_twin(nets[1].parameters(), setting)]
    for net, optimizer in zip(nets, optimizers, strict=True):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        for loss in losses(torch.float32, count=6):
            optimizer.zero_grad()
            scaler.scale(loss(net)).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
    assert optimizers[0].param_groups[0]["lr"] == optimizers[1].param_groups[0]["lr"] < options["lr"]
    torch.testing.assert_close(flat(nets[0].parameters()), flat(nets[1].parameters()), rtol=1e-4, atol=1e-6)
