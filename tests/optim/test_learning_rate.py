"""``lr`` as a schedule, or in a chain → a number in each group, for loggers, torch's schedulers and checkpoints."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR

import torchopt_dist as todist
from tests.optim.table import ROWS
from tests.rows import each_row
from torchopt_dist.schedule import linear_schedule
from torchopt_dist.transform.scale import scale, scale_by_learning_rate

DOUBLE = torch.float64
DOWN = linear_schedule(0.5, 0.1, 4)


def leaf():
    return torch.tensor([1.0, -2.0], dtype=DOUBLE, requires_grad=True)


def go(optimizer, w, steps, scheduler=None, clip=None):
    for step in range(steps):
        w.grad = torch.full_like(w, 1.0 + step)
        if clip is not None:
            clip_grad_norm_([w], clip)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def rates(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


def clipped(lr):
    return todist.chain(todist.transform.clip_grad_norm(1.0), todist.adam(lr))


def by_links(params, lr):
    """A chain of which no single rate is to be found, but whose state has counts of the whole group."""
    links = (todist.transform.scale_by_schedule(DOWN), todist.transform.trace(0.5))
    return todist.Optimizer(
        params, todist.chain(*links, scale_by_learning_rate(1.0), scale_by_learning_rate(lr))
    )


def injected(params, lr):
    return todist.Optimizer(params, todist.transform.inject_hyperparams(todist.adam)(lr=lr, eps=lr))


MAKERS = {
    **{name: row.plain for name, row in ROWS.items()},
    "a chain": lambda params, lr: todist.Optimizer(params, clipped(lr)),
}


@each_row("name", MAKERS)
def test_a_schedule_s_rate_is_a_number_in_the_group(name):
    """It is that of the next step, and each step is one that was made with this number."""
    w, by_hand = leaf(), leaf()
    optimizer, constant = MAKERS[name]([w], lr=DOWN), MAKERS[name]([by_hand], lr=0.5)
    for count in range(6):
        assert rates(optimizer) == [DOWN(count)]
        assert type(rates(optimizer)[0]) is float
        constant.param_groups[0]["lr"] = DOWN(count)
        go(optimizer, w, 1)
        go(constant, by_hand, 1)
    torch.testing.assert_close(w, by_hand, rtol=1e-14, atol=0)


@each_row("name", ["SGD", "Adam", "a chain"])
@each_row("scheduler", [lambda o: ExponentialLR(o, 0.5), lambda o: CosineAnnealingLR(o, 5)])
def test_schedulers_of_torch_have_the_last_word(name, scheduler):
    """Over a schedule, too: it waits while they set the rate."""
    moved = []
    for lr in (0.5, DOWN):
        w = leaf()
        optimizer = MAKERS[name]([w], lr=lr)
        go(optimizer, w, 5, scheduler(optimizer))
        moved.append((w.detach(), rates(optimizer)))
    torch.testing.assert_close(moved[0], moved[1])
    assert moved[0][1][0] < 0.2


def test_a_chain_s_rate_follows_a_scheduler_of_torch():
    ours, theirs = leaf(), leaf()
    optimizer, twin = todist.Optimizer([ours], clipped(0.5)), torch.optim.Adam([theirs], lr=0.5)
    go(optimizer, ours, 5, ExponentialLR(optimizer, 0.5))
    go(twin, theirs, 5, ExponentialLR(twin, 0.5), clip=1.0)
    assert rates(optimizer) == rates(twin)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)  # the clipping's epsilon


def test_groups_of_a_chain_have_rates_of_their_own():
    params = [leaf(), leaf()]
    learned = torch.tensor(0.25, dtype=DOUBLE)
    impl = todist.chain(scale(2.0), todist.sgd(1.0))
    optimizer = todist.Optimizer(
        [{"params": params[:1], "lr": DOWN}, {"params": params[1:], "lr": learned}], impl
    )
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    learned.fill_(0.125)
    optimizer.step()
    torch.testing.assert_close(params[0], leaf() - 2 * 0.5 - 2 * 0.4)
    torch.testing.assert_close(params[1], leaf() - 2 * 0.25 - 2 * 0.125)
    assert rates(optimizer) == [0.3, learned]


@each_row(
    "impl",
    [
        todist.chain(todist.transform.clip_grad_norm(1.0), scale(-0.1)),
        todist.chain(scale_by_learning_rate(0.5), scale_by_learning_rate(0.5)),
        todist.adan(0.1, weight_decay=0.5),
        todist.sgd([0.5]),
    ],
)
def test_where_no_single_rate_is_in_a_chain_groups_have_none(impl):
    """Adan's weight decay makes another factor of its rate."""
    optimizer = todist.Optimizer([leaf()], impl)
    assert "lr" not in optimizer.param_groups[0]
    with pytest.raises(
        ValueError, match="`lr` must not be set for a group, as `impl` has its options already"
    ):
        optimizer.add_param_group({"params": [leaf()], "lr": 0.5})


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(leaf().detach())


def by_torch(optimizer, state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    "make", [MAKERS["SGD"], MAKERS["Adam"], MAKERS["RMSprop"], MAKERS["a chain"], by_links, injected]
)
@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.filterwarnings("ignore")  # torch's own
def test_a_distributed_checkpoint_resumes_a_schedule(make, flatten, tmp_path):
    """The count is in the state from construction: what is loaded is what a fresh optimizer has places for."""
    options = dcp_state.StateDictOptions(flatten_optimizer_state_dict=flatten)
    unbroken, first, second = Net(), Net(), Net()
    optimizers = [make(net.parameters(), lr=DOWN) for net in (unbroken, first, second)]
    go(optimizers[0], unbroken.w, 2)
    go(optimizers[0], unbroken.w, 2)
    go(optimizers[1], first.w, 2)
    for net, optimizer in ((first, optimizers[1]), (second, optimizers[2])):
        optimizer.zero_grad()
        state = {"net": net.state_dict()}
        state["optimizer"] = dcp_state.get_optimizer_state_dict(net, optimizer, options=options)
        if net is first:
            dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
        else:
            dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
            net.load_state_dict(state["net"])
            dcp_state.set_optimizer_state_dict(net, optimizer, state["optimizer"], options=options)
    if "lr" in optimizers[1].param_groups[0]:
        assert rates(optimizers[1]) == rates(optimizers[2]) == [DOWN(2)]
    go(optimizers[2], second.w, 2)
    torch.testing.assert_close(second.w, unbroken.w, rtol=1e-14, atol=0)


@pytest.mark.parametrize("taken_over", [False, True])
def test_a_loaded_rate_is_the_schedule_s_where_a_schedule_said_it(taken_over):
    """Another schedule goes on at the saved count; a rate that somebody set stays."""
    w = leaf()
    optimizer = todist.SGD([w], lr=DOWN)
    go(optimizer, w, 2)
    if taken_over:
        optimizer.param_groups[0]["lr"] = 0.125
    other = todist.SGD([w], lr=linear_schedule(8.0, 0.0, 4))
    other.load_state_dict(by_torch(optimizer, optimizer.state_dict()))
    assert rates(other) == [0.125 if taken_over else 4.0]
    go(other, w, 1)
    assert rates(other) == [0.125 if taken_over else 2.0]


def test_a_schedule_that_says_something_else_than_a_rate_is_refused_at_once():
    with pytest.raises(ValueError, match=r"`lr` must be at least 0, got -0\.5"):
        todist.SGD([leaf()], lr=lambda count: -0.5 + 0 * count)
    w = leaf()
    optimizer = todist.SGD([w], lr=lambda count: 0.5 - count)
    with pytest.raises(ValueError, match=r"`lr` must be at least 0, got -0\.5"):
        go(optimizer, w, 2)


def test_a_schedule_may_say_a_tensor_that_requires_grad():
    learned, w = torch.tensor(0.25, requires_grad=True), leaf()
    optimizer = todist.SGD([w], lr=lambda count: learned)
    go(optimizer, w, 1)
    assert rates(optimizer) == [0.25]
    assert torch.equal(w.detach(), leaf().detach() - 0.25)


def test_injected_hyperparameters_have_names_in_the_group():
    w = leaf()
    optimizer = injected([w], DOWN)
    go(optimizer, w, 2)
    shared = optimizer.param_groups[0]["shared_state"]
    assert {key: value.item() for key, value in shared.items()} == {
        "step": 2,
        "hyperparams/eps": DOWN(2),
        "hyperparams/lr": DOWN(2),
    }
