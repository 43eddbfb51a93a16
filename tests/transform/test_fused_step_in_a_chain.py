"""A fused step behind other links and with a schedule → the numbers of the links one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import torchopt_dist as todist
from tests.optim.table import CASES, ROWS
from tests.rows import each_row
from torchopt_dist.transform import add_decayed_weights, clip_grad_norm, clip_grad_value, trace
from torchopt_dist.transform.apply_updates import differentiable_step, step_in_place
from torchopt_dist.transform.base import ChainedGradientTransformation

PREFIXES = {
    "none": (),
    "norm": (clip_grad_norm(0.5),),
    "value": (todist.transform.masked(clip_grad_value(0.3), [True, True, False]),),
    "with a state": (clip_grad_norm(0.5), trace(0.9)),
    "masked": (todist.transform.masked(trace(0.9), [True, False, False]), add_decayed_weights(0.1)),
}
OPTIMIZERS = {
    "adam": todist.adam,
    "adamw": todist.adamw,
    "momentum": lambda lr: todist.sgd(lr, momentum=0.9, dampening=0.2),
    "sgd": todist.sgd,
    "rmsprop": lambda lr: todist.rmsprop(lr, momentum=0.5),
}
RATES = {"number": 0.1, "schedule": lambda count: 0.1 * 0.5**count, "number by a schedule": lambda count: 0.1}


def params():
    generator = torch.Generator().manual_seed(0)
    dtypes = (torch.float64, torch.float64, torch.complex128)
    return [torch.randn(3, dtype=dtype, generator=generator) for dtype in dtypes]


def counted(impl, calls):
    """The same chain; its fused steps note that they ran."""

    def note(name, step):
        def run(*args):
            calls.append(name)
            return step(*args)

        return run

    steps = impl.fused_step
    noted = {name: note(name, getattr(steps, name)) for name in ("in_place", "differentiable")}
    return ChainedGradientTransformation(*impl.transformations, fused_step=replace(steps, **noted))


@each_row("rate", RATES)
@each_row("name", OPTIMIZERS)
@each_row("prefix", PREFIXES)
def test_a_fused_step_gives_the_numbers_of_the_links(prefix, name, rate):
    impl = todist.chain(*PREFIXES[prefix], todist.chain(OPTIMIZERS[name](RATES[rate])))
    calls = []
    fused, links = counted(impl, calls), ChainedGradientTransformation(*impl.transformations)
    assert impl.fused_step.first_link == len(PREFIXES[prefix])
    ways = {"in place": params(), "links": params(), "recorded": params()}
    states = {way: links.init(tree) for way, tree in ways.items()}
    for step in range(3):
        grads = [p * (step + 1) for p in params()]
        if step == 1:
            grads[1] = None
        state = step_in_place(fused, ways["in place"], grads, states["in place"])
        states["in place"] = states["in place"] if state is None else state
        updates, states["links"] = links.update(grads, states["links"], params=ways["links"], inplace=False)
        ways["links"] = todist.apply_updates(ways["links"], updates, inplace=False)
        ways["recorded"], states["recorded"] = differentiable_step(
            fused, ways["recorded"], grads, states["recorded"]
        )
    for way in ("in place", "recorded"):
        torch.testing.assert_close(ways[way], ways["links"], rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(states[way], states["links"], rtol=1e-12, atol=1e-14)
    assert calls == ["in_place", "differentiable"] * 3


@each_row("around", ["nothing", "vmap", "func.grad"])
def test_a_learned_schedule_gets_its_gradient_from_the_links(around):
    """The links run where a schedule's value has a graph, which the fused step does not take."""

    def end(peak, rate):
        impl = todist.chain(clip_grad_norm(0.5), todist.adam(rate(peak)))
        tree = params()[:1]
        state = impl.init(tree)
        for _ in range(3):
            tree, state = differentiable_step(impl, tree, [2 * p for p in tree], state)
        return tree[0].square().sum()

    def learned(peak):
        return lambda count: peak * 0.5**count

    peak = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    if around == "nothing":
        (grad,) = torch.autograd.grad(end(peak, learned), peak)
    elif around == "func.grad":
        grad = torch.func.grad(lambda peak: end(peak, learned))(peak.detach())
    else:
        (grad,) = torch.autograd.grad(
            torch.vmap(lambda p: end(p, learned), randomness="same")(peak.expand(2)).mean(), peak
        )
    numbers = (end(peak.item() + h, learned).item() for h in (1e-5, -1e-5))
    above, below = numbers
    assert grad.item() == pytest.approx((above - below) / 2e-5, rel=1e-6)


def test_a_chain_that_goes_on_after_an_optimizer_has_no_fused_step():
    impl = todist.chain(todist.adam(0.1), clip_grad_norm(1.0))
    assert impl.fused_step.in_place is None
    assert impl.fused_step.differentiable is None


@each_row("clip", [clip_grad_norm(0.3), clip_grad_norm(0.3, "inf"), clip_grad_value(0.1)])
@each_row("dtype", [torch.float32, torch.bfloat16])
def test_clipping_without_a_graph_gives_the_numbers_of_clipping_with_one(clip, dtype):
    grads = [torch.linspace(-2, 1, 5, dtype=dtype), torch.ones((), dtype=dtype)]
    recorded, _ = clip.update(grads, clip.init(grads))
    with torch.no_grad():
        plain, _ = clip.update(grads, clip.init(grads))
    assert all(
        torch.equal(one, other) and one.dtype is dtype for one, other in zip(plain, recorded, strict=True)
    )


@each_row(("name", "setting"), CASES)
def test_a_step_of_gradients_alone_is_the_same_wherever_the_parameters_are(name, setting):
    row = ROWS[name]
    impl = row.function(**row.options[setting])
    grads = [torch.randn(3, dtype=torch.float64)]
    points = [[torch.randn(3, dtype=torch.float64)] for _ in range(2)]
    states = [impl.init(points[0])] * 2
    for _ in range(3):
        steps = [impl.update(grads, s, params=p, inplace=False) for s, p in zip(states, points, strict=True)]
        states = [state for _, state in steps]
    if impl.fused_step.of_gradients_alone:
        torch.testing.assert_close(steps[0][0], steps[1][0], rtol=0, atol=0)
    if row.options[setting].get("weight_decay") or name == "AdamW":
        assert not impl.fused_step.of_gradients_alone
        assert not torch.equal(steps[0][0][0], steps[1][0][0])
