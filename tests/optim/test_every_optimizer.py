"""Every row of ``table.py`` → the same steps as its twin's, by every face, compiled and not."""

from __future__ import annotations

import copy

import optree
import pytest
import torch

import torchopt_dist as todist
from tests.optim.graph import count_nodes
from tests.optim.programs import DOUBLE, drawn, flat, losses, make
from tests.optim.table import CASES, ROWS
from tests.rows import each_row
from torchopt_dist import pytree
from torchopt_dist.optim import FuncOptimizer


def tolerance(dtype):
    return {
        DOUBLE: {"rtol": 1e-10, "atol": 1e-11},
        torch.float32: {"rtol": 2e-4, "atol": 2e-5},
        torch.complex64: {"rtol": 2e-4, "atol": 2e-5},
        torch.bfloat16: {"rtol": 0.06, "atol": 0.06},
    }[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE, torch.complex64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "setting"), CASES)
def test_many_steps_equal_the_twin(name, setting, dtype):
    row = ROWS[name]
    options = row.options[setting]
    start = make(dtype)
    twin, ours, generic = copy.deepcopy(start), copy.deepcopy(start), copy.deepcopy(start)
    optimizers = [
        (twin, row.make_twin(twin.parameters(), setting)),
        (ours, row.plain(ours.parameters(), **options)),
        (generic, todist.Optimizer(generic.parameters(), todist.chain(row.function(**options)))),
    ]
    count = 50 if name == "RAdam" else 30  # it begins slowly
    for loss in losses(dtype, options.get("maximize", False), count):
        for net, optimizer in optimizers:
            optimizer.zero_grad()
            loss(net).backward()
            optimizer.step()
    moved = (flat(twin.parameters()) - flat(start.parameters())).abs().max()
    assert moved > 0.05
    for net in (ours, generic):  # the whole step at once, and link by link
        torch.testing.assert_close(flat(net.parameters()), flat(twin.parameters()), **tolerance(dtype))


@each_row(("name", "setting"), CASES)
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


@each_row(("name", "setting"), CASES)
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
    kept = [pair for links in zip(state, after, strict=True) for pair in zip(*links, strict=True) if pair[0]]
    assert kept or (name, setting) == ("SGD", "plain")
    assert all(before["b"] is later["b"] for before, later in kept)


@each_row("name", ROWS)
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


@each_row(("name", "setting"), CASES)
def test_update_is_pure_unless_it_may_overwrite(name, setting):
    row = ROWS[name]
    impl = row.function(**row.options[setting])
    params = [torch.arange(1.0, 4.0), torch.ones(2, 2)]
    with torch.no_grad():
        _, state = impl.update(params, impl.init(params), params=params)
        held = [leaf for leaf in [*pytree.flatten(state)[0], *params] if isinstance(leaf, torch.Tensor)]
        before = [leaf.clone() for leaf in held]
        first, second = (impl.update(params, state, params=params, inplace=False) for _ in range(2))
    for now, then in zip(held, before, strict=True):
        assert torch.equal(now, then)
    for one, other in zip(pytree.flatten(first)[0], pytree.flatten(second)[0], strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


@each_row(("name", "setting"), CASES)
@each_row("recorded", [False, True])
def test_each_parameter_has_a_state_of_its_layout_in_a_storage_of_its_own(name, setting, recorded):
    row = ROWS[name]
    shapes = ((2, 3, 4, 5), (4, 3), (3,), (3,))
    params = [torch.rand(shape) for shape in shapes]
    params[0] = params[0].to(memory_format=torch.channels_last)
    params[1] = params[1].t()
    params = [p.requires_grad_() for p in params]
    optimizer = FuncOptimizer(row.function(**row.options[setting]), inplace=not recorded)
    made = params
    for _ in range(2):
        made = optimizer.step(sum(p.square().sum() for p in made), made)
    assert made[0].requires_grad
    for link in optimizer.get_states()[0]:
        for field in (field for field in link if isinstance(field, list) and field[0].dim()):
            assert [x.stride() for x in field] == [p.stride() for p in params]
            assert [x.untyped_storage().nbytes() for x in field] == [x.nbytes for x in field]


@each_row("name", ROWS)
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


@each_row(("name", "setting"), CASES)
def test_lazily_conjugated_gradients(name, setting):
    """``W.mH @ x`` gives such gradients, to both classes."""
    row = ROWS[name]
    options = row.options[setting]
    x = drawn(3, 4, seed=0, dtype=torch.complex64)
    moved = []
    for lazy in (True, False):
        w, net = torch.nn.Parameter(x[:, :2].clone()), torch.nn.Module()
        net.w = torch.nn.Parameter(w.detach().clone())
        optimizer = row.plain([w], **options)
        for step in range(2):
            w.grad = x[:, step : step + 2].conj() if lazy else x[:, step : step + 2].conj().resolve_conj()
            assert w.grad.is_conj() is lazy
            optimizer.step()
        adjoint = net.w.mH if lazy else net.w.conj().resolve_conj().mT
        row.meta(net, **options).step((adjoint @ x).abs().square().sum())
        moved.append([w.detach(), net.w.detach()])
    torch.testing.assert_close(moved[0], moved[1])


def test_a_lazily_conjugated_parameter_is_refused():
    w = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64).conj())
    w.grad = torch.ones_like(w)
    with pytest.raises(
        ValueError, match=r"`params` must not be lazily conjugated .* got one that is: make it"
    ):
        todist.SGD([w], 0.1).step()


@each_row(("name", "setting"), CASES)
def test_update_is_pure_unless_it_is_asked_to_overwrite(name, setting):
    row = ROWS[name]
    impl = todist.chain(todist.transform.clip_grad_norm(1.0), row.function(**row.options[setting]))
    params = [torch.tensor([1.0, -2.0], dtype=DOUBLE), torch.tensor([[0.5]], dtype=DOUBLE)]
    with torch.no_grad():
        _, state = impl.update([p.sin() for p in params], impl.init(params), params=params)
        tensors = optree.tree_leaves(state)
        held = [tensor.clone() for tensor in tensors]
        _, after = impl.update([p.cos() for p in params], state, params=params)
    assert all(map(torch.equal, tensors, held))
    assert len(optree.tree_leaves(after)) == len(held)


@each_row("fused", [None, True])
@each_row(("name", "setting"), CASES)
def test_a_gradient_of_zeros_without_memory_is_one_of_zeros(name, setting, fused):
    row = ROWS[name]
    options = dict(row.options[setting])
    if fused:  # where there is a fused step to demand
        if name not in ("SGD", "Adam", "AdamW", "RMSprop") or "fused" in options or options.get("amsgrad"):
            return
        options["fused"] = True
    columns = []
    for kind in ("twin", "none", "plain"):
        params = [torch.tensor([1.0, -2.0], requires_grad=True), torch.tensor([0.5], requires_grad=True)]
        optimizer = row.make_twin(params, setting) if kind == "twin" else row.plain(params, **options)
        for _ in range(3):
            optimizer.zero_grad()
            zeros = torch.sgn(params[0]).sum() if kind != "plain" else (0 * params[0]).sum()
            (zeros + params[1].pow(3).sum()).backward()  # torch has no memory for the gradient of `sgn`
            optimizer.step()
        columns.append(flat(params))
    torch.testing.assert_close(columns[1], columns[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(columns[1], columns[2], rtol=1e-5, atol=1e-6)
