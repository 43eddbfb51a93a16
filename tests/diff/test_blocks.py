"""Replayed loops that go back block by block have the gradient of recorded ones, whatever the blocks are made of."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchopt_dist as todist
from examples.adjoints import PeakMemory
from tests.diff.adjoint_table import ADJOINTS, OPTIMIZERS, Problem, gradients
from tests.rows import each_row
from torchopt_dist.process import resources

D = torch.float64
RECORDED = todist.Recorded()


def gradients_of(adjoint, loss, net, steps, ins, **options):
    result = todist.inner_loop(
        loss, todist.adam(lr=0.05, eps=1e-3), net, steps, adjoint=adjoint, seed=1, **options
    )
    outer = sum((leaf**3).sum() for leaf in result.params.parameters()) + result.losses.square().sum()
    return torch.autograd.grad(outer, ins, allow_unused=True)


def agree(loss, net, steps=3, *, blocks="auto", meta=(), more=(), **options):
    """Replayed by blocks and recorded; returns the gradients."""
    ins = [*(p for p in net.parameters() if p.requires_grad), *meta, *more]
    options = {"meta": [*meta, *more], **options}
    expected = gradients_of(RECORDED, loss, net, steps, ins, **options)
    found = gradients_of(
        todist.Replayed(snapshots=2, blocks=blocks, check=True), loss, net, steps, ins, **options
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)
    return found


@each_row("optimizer", OPTIMIZERS)
def test_gradients_are_those_of_the_loop_by_hand(optimizer):
    problem = Problem("module", optimizer)
    params, _losses = problem.by_hand(ADJOINTS["recorded"])
    result = problem.run(todist.Replayed(snapshots=2, blocks=problem.net))
    expected = gradients(problem.outer(params), problem.tensors())
    found = gradients(problem.outer(result.params), problem.tensors())
    for what, gradient in expected.items():
        if gradient is None:
            assert found[what] is None or not found[what].any(), what
        else:
            torch.testing.assert_close(found[what], gradient, rtol=1e-10, atol=1e-10)


SCALE = torch.tensor(0.8, dtype=D, requires_grad=True)
SHIFT = torch.tensor([0.1, -0.2, 0.3, 0.05], dtype=D, requires_grad=True)


class Block(nn.Module):
    """One with all that is hard to call again."""

    def __init__(self, first: nn.Linear, *, inplace: bool = False) -> None:
        super().__init__()
        self.first, self.second = first, nn.Linear(4, 4)
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.3)
        self.inplace = inplace
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, pair: tuple[Tensor, str], *, mask: Tensor) -> tuple[Tensor, Any]:
        self.calls += 1
        y = x.mul_(1.1) if self.inplace else x * 1.1
        y = self.drop(torch.tanh(self.norm(self.first(y)))) * mask * self.calls.clone()
        return SCALE * self.second(y) + pair[0], (pair[0] * 0.9, pair[1])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([Block(first), Block(nn.Linear(4, 4), inplace=True), Block(first)])
        self.blocks[1].second.requires_grad_(False)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * SHIFT
        mask = (tokens > 0).unsqueeze(1)
        pair: Any = (x.sin(), "a pair")
        for block in self.blocks:
            x, pair = block(x, pair, mask=mask)
        return self.head(x * pair[0])


@each_row("calls", [1, 2])
def test_dropout_buffers_tied_and_frozen_parameters_and_whatever_a_block_takes_and_returns(calls):
    torch.manual_seed(0)
    net = Net().double()
    tokens = [torch.randint(0, 5, (6,)) for _ in range(3)]
    weights = torch.rand(6, dtype=D, requires_grad=True)

    def loss(net: nn.Module, tokens: Tensor) -> Tensor:
        views = [net(tokens) for _ in range(calls)]
        return (weights * F.cross_entropy(sum(views), tokens, reduction="none")).mean() / SCALE

    before = {name: value.clone() for name, value in net.state_dict().items()}
    found = agree(loss, net, tokens, blocks=net.blocks, meta=(weights,), more=(SCALE, SHIFT))
    assert all(gradient.any() for gradient in found)
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])
    made = [
        todist.inner_loop(
            loss, todist.sgd(lr=0.1), net, tokens, meta=(weights, SCALE, SHIFT), seed=1, adjoint=one
        )
        for one in (RECORDED, todist.Replayed(blocks=net.blocks))
    ]
    for one, other in zip(*(m.params.buffers() for m in made), strict=True):
        torch.testing.assert_close(one, other)


@each_row("randomness", ["different", "same"])
def test_tasks_at_once_with_all_that_is_hard_to_call_again(randomness):
    torch.manual_seed(0)
    net = Net().double()
    tokens = torch.randint(0, 5, (2, 3, 6))
    weights = torch.rand(2, 6, dtype=D, requires_grad=True)

    def task(adjoint: Any, tokens: Tensor, weights: Tensor) -> Tensor:
        def loss(net: nn.Module, tokens: Tensor) -> Tensor:
            each = F.cross_entropy(net(tokens), tokens, reduction="none")
            return (weights * each).mean() / SCALE

        made = todist.inner_loop(
            loss, todist.adam(lr=0.05, eps=1e-3), net, tokens, meta=(weights, SCALE, SHIFT), seed=1, adjoint=adjoint
        )  # fmt: skip
        return sum((p**3).sum() for p in made.params.parameters()) + made.losses.square().sum()

    def at_once(adjoint: Any) -> Tensor:
        return torch.vmap(partial(task, adjoint), randomness=randomness)(tokens, weights)

    if randomness == "same":
        one_by_one = torch.stack([task(RECORDED, *each) for each in zip(tokens, weights, strict=True)])
    else:
        one_by_one = at_once(todist.Replayed(snapshots=2))
    ins = [*(p for p in net.parameters() if p.requires_grad), weights, SCALE, SHIFT]
    blocks = at_once(todist.Replayed(snapshots=2, blocks=net.blocks))
    for one, other in zip(*(torch.autograd.grad(m.sum(), ins) for m in (blocks, one_by_one)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)
        assert one.any()


@each_row("masked", [False, True])
def test_an_encoder_in_evaluation(masked):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, 0.5, batch_first=True)
    net = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).double().eval()
    x = torch.randn(2, 5, 4, dtype=D, requires_grad=True)
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=D) if masked else None
    agree(lambda net: F.mse_loss(net(x, mask=mask), x.flip(0)), net, 2, more=(x,))


class Stack(nn.Module):
    """Blocks between other layers; they may hold what was computed before them."""

    def __init__(self, width: int = 3, depth: int = 4) -> None:
        super().__init__()
        self.before = nn.Linear(width, width)
        self.layers = nn.ModuleList(Modulated(width) for _ in range(depth))
        self.after = nn.Linear(width, width)

    def forward(self, x: Tensor, held: bool) -> Tensor:
        x = torch.tanh(self.before(x))
        for layer in self.layers:
            layer.code = x.sigmoid() if held else torch.ones_like(x)
            x = layer(x)
        return self.after(x)


class Modulated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.code = torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * self.code


@each_row("when", [0, 2])
def test_a_block_that_holds_a_tensor_with_a_history_is_named(when):
    net = Stack().double()
    x = torch.randn(4, 3, dtype=D)
    agree(lambda net, _: net(x, False).square().mean(), net, [0, 1, 2], blocks=net.layers)
    with pytest.raises(ValueError, match=r"by their arguments: block 'layers\.0' uses"):
        agree(lambda net, number: net(x, number == when).square().mean(), net, [0, 1, 2], blocks=net.layers)


class Telling(nn.Linear):
    """A block that hands something on by more than what it returns."""

    def __init__(self, way: str, told: list[Any]) -> None:
        super().__init__(3, 3)
        self.way, self.told = way, told

    def forward(self, x: Tensor, beside: dict[str, Tensor]) -> Tensor:
        if self.way == "input in place":
            x = x.mul_(1.1)
        made = super().forward(x)
        if self.way == "to the next" and self.told:
            made = made + self.told[-1]
        if self.way == "its input":
            self.told.append(x)
        elif self.way in ("of an input", "to the next"):
            self.told.append((x * 2).sin())
        elif self.way == "of a parameter":
            self.told.append(self.weight.square().sum())
        elif self.way == "of both":
            self.told.append(made.square().mean())
        elif self.way == "in a dictionary":
            beside["more"] = made.square().mean()
        elif self.way == "in a tensor":
            beside["total"] += made.square().mean()
        return made * 1.1


class Told(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.told: list[Any] = []
        self.before = nn.Linear(3, 3)
        self.layers = nn.ModuleList(Telling(way, self.told) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:  # a copied module has lists of its own
            layer.told = self.told
        self.told.clear()
        beside = {"total": x.new_zeros(())}
        inputs = [self.before(x) * 1.1]
        for layer in self.layers:
            inputs.append(layer(inputs[-1], beside))
        told = [] if self.layers[0].way == "to the next" else self.told
        return sum(x.square().mean() for x in [inputs[1], inputs[-1], *beside.values(), *told])


@each_row(
    ("way", "text"),
    [
        ("not", None),
        (
            "of both",
            r"was computed in block 'layers\.\d' came to the loss or to another block by an attribute",
        ),
        ("of an input", r"was computed in block 'layers\.\d' came"),
        ("of a parameter", r"was computed in block 'layers\.\d' came"),
        ("its input", r"was computed in block 'layers\.\d' came"),
        ("to the next", r"by their arguments: block 'layers\.1' uses"),
        ("in a dictionary", r"block 'layers\.0' changes a list or a dictionary that it is given"),
        ("in a tensor", r"block 'layers\.0' changes a tensor that it is given"),
        ("input in place", r"block 'layers\.1' changes an input, and the loss .* uses this input later"),
    ],
)
@each_row("tasks", [1, 2])
def test_a_block_that_hands_on_more_than_what_it_returns_is_named(way, text, tasks):
    net = Told(way).double()

    def adapt(x: Tensor, adjoint: todist.Adjoint) -> Tensor:
        moved = todist.inner_loop(lambda net: net(x), todist.sgd(lr=0.1), net, 2, adjoint=adjoint).params
        return sum(p.square().sum() for p in moved.parameters())

    def at_once(adjoint: todist.Adjoint) -> Tensor:
        each = partial(adapt, adjoint=adjoint)
        return torch.vmap(each)(x) if tasks > 1 else each(x[0])

    x = torch.randn(tasks, 4, 3, dtype=D)
    if tasks > 1 and way == "in a tensor":
        return  # vmap does not let one tensor take what differs
    expected = at_once(RECORDED)
    if text is None:
        torch.testing.assert_close(at_once(todist.Replayed(blocks=net.layers)), expected)
    else:
        with pytest.raises(ValueError, match=text):
            at_once(todist.Replayed(blocks=net.layers))


@each_row("way", ["to the loss", "to the next block", "not"])
def test_what_a_block_makes_of_meta_tensors_alone_may_go_to_the_loss_and_to_no_other_block(way):
    scale, told = torch.tensor(0.5, dtype=D, requires_grad=True), []

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if not told:
                told.append((scale * 2).sin())
            return super().forward(x) * (told[0] if way == "to the next block" else scale)

    net = nn.Sequential(Scaled(3, 3), Scaled(3, 3)).double()
    x = torch.randn(4, 3, dtype=D)

    def loss(net: nn.Module) -> Tensor:
        told.clear()
        made = net(x).square().mean()
        return made + told[0] * made if way == "to the loss" else made

    if way == "to the next block":
        with pytest.raises(ValueError, match=r"by their arguments: block '1' uses"):
            agree(loss, net, blocks=net, more=(scale,))
    else:
        assert agree(loss, net, blocks=net, more=(scale,))[-1].any()


def test_an_input_that_only_a_block_uses_may_be_changed_in_place():
    net = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(3, 3), nn.ELU(inplace=True)))).double()
    x = torch.randn(4, 3, dtype=D)
    agree(lambda net: net(x).square().mean(), net, blocks=net)


def test_parameters_that_the_loss_puts_in_for_a_call():
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(3))).double()
    shift = torch.rand(3, 3, dtype=D, requires_grad=True)
    x = torch.randn(4, 3, dtype=D)

    def loss(net: nn.Module) -> Tensor:
        moved = {name: p + shift if name.endswith("weight") else p for name, p in net.named_parameters()}
        return torch.func.functional_call(net, moved, (x,)).square().mean()

    assert agree(loss, net, meta=(shift,))[-1].any()


def test_blocks_are_given_tensors_that_depend_on_each_other():
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2))).double()
    rows = torch.randn(2, 4, 3, dtype=D, requires_grad=True)
    weight = torch.rand(3, 3, dtype=D, requires_grad=True)
    moved = weight + 0.1

    def loss(net: nn.Module, batch: Tensor) -> Tensor:
        return torch.func.functional_call(net, {"1.0.weight": moved}, (batch,)).square().mean()

    first, second = rows
    found = agree(loss, net, [first, second], meta=(rows, weight), more=(moved, first))
    assert all(gradient.any() for gradient in found[-4:])


def test_blocks_of_tasks_at_once_are_given_tensors_that_depend_on_each_other():
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2))).double()
    scale = torch.tensor(0.7, dtype=D, requires_grad=True)
    factor = scale.sin()
    rows = torch.randn(2, 3, 4, 3, dtype=D, requires_grad=True)

    def task(rows: Tensor, adjoint: todist.Adjoint) -> Tensor:
        adapted = todist.inner_loop(
            lambda net, batch: (net(batch) * factor).square().mean(),
            todist.sgd(lr=0.1),
            net,
            list(rows),
            meta=(factor, scale, rows),
            adjoint=adjoint,
        )
        return sum(p.square().sum() for p in adapted.params.parameters())

    ins = [*net.parameters(), scale, rows]
    one_by_one = sum(task(each, RECORDED) for each in rows)
    at_once = torch.vmap(partial(task, adjoint=todist.Replayed(blocks=net)))(rows).sum()
    both = [torch.autograd.grad(made, ins, retain_graph=True) for made in (at_once, one_by_one)]
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other)


class Checkpointed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(checkpoint(super().forward, x, use_reentrant=False))


def test_checkpoints_in_blocks():
    torch.manual_seed(0)
    net = nn.Sequential(Checkpointed(3, 3), Checkpointed(3, 3)).double()
    x = torch.randn(4, 3, dtype=D)
    agree(lambda net: net(x).square().mean(), net)  # a warning, that a step is recorded, is an error


def test_a_loop_around_the_loop():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    x, scale = torch.randn(4, 3, dtype=D), torch.tensor(1.3, dtype=D, requires_grad=True)
    rate = torch.tensor(0.1, dtype=D, requires_grad=True)

    def outer(adjoint: Any) -> Tensor:
        def loss(rate: Tensor) -> Tensor:
            adapted = todist.inner_loop(
                lambda net: (scale * net(x) ** 2).mean(),
                todist.sgd(lr=rate),
                net,
                2,
                meta=scale,
                adjoint=adjoint,
            )
            return adapted.params(x).square().sum()

        rate_after = todist.inner_loop(
            loss, todist.sgd(lr=0.1), rate, 2, meta=scale, adjoint=todist.Truncated(1)
        ).params
        return torch.autograd.grad(rate_after, scale)[0]

    torch.testing.assert_close(outer(todist.Replayed(blocks=net)), outer(RECORDED))


def test_modes_of_the_loss_hold_when_a_block_is_called_again():
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    x = torch.randn(4, 8)
    seen = set()

    class Seen(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            seen.add((out.dtype, self.training, torch.is_grad_enabled()))
            return out

    net[1].__class__ = Seen

    def loss(net: nn.Module) -> Tensor:
        with torch.no_grad():
            net(x)
        seen.clear()
        with torch.autocast("cpu", torch.bfloat16):
            return net(x).float().square().mean()

    result = todist.inner_loop(
        loss, todist.sgd(lr=0.1), net, 2, adjoint=todist.Replayed(snapshots=1, blocks="auto")
    )
    torch.autograd.grad(result.params[0].weight.sum(), net[0].weight)
    assert {mode[:2] for mode in seen} == {(torch.bfloat16, True)}


def test_a_block_without_forward_mode_is_recorded_with_its_step():
    class Inverse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(3 * torch.eye(3, dtype=D))

        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.solve(self.weight, x)

    net = nn.Sequential(Inverse(), nn.Linear(3, 3, dtype=D))
    x = torch.randn(3, 3, dtype=D)
    agree(lambda net: net(x).square().mean(), net, blocks=net)


@each_row("samples", [1, 4])
def test_memory_grows_with_the_blocks_by_their_boundaries(samples):
    torch.manual_seed(0)
    xs = torch.randn(samples, 500, 8)

    def peak(adjoint: Any, depth: int) -> int:
        net = nn.Sequential(
            *(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)) for _ in range(depth))
        )

        def task(x: Tensor) -> Tensor:
            result = todist.inner_loop(
                lambda net: net(x).square().mean(), todist.sgd(lr=0.1), net, 2, adjoint=adjoint
            )
            return result.params(x[:1]).sum()

        with PeakMemory() as memory:
            outer = task(xs[0]) if samples == 1 else torch.vmap(task)(xs).sum()
            torch.autograd.grad(outer, list(net.parameters()))
        return memory.peak

    whole, blocks = todist.Replayed(snapshots=1), todist.Replayed(snapshots=1, blocks="auto")
    peak(blocks, 2)
    growth = [peak(adjoint, 12) - peak(adjoint, 6) for adjoint in (whole, blocks)]
    assert growth[1] < growth[0] / 6
    sizes = 3 * 500 * 8 + 3 * 1096  # boundaries, their gradients, and the gradients of these; parameters
    assert growth[1] / 6 < 4 * samples * sizes


@pytest.mark.skipif(resources.glibc() is None, reason="needs glibc's allocator")
def test_free_pages_between_tensors_that_stay_are_given_back(monkeypatch):
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    x = torch.ones(1, 2)
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p

    def adapt(adjoint: Any) -> None:
        moved = todist.inner_loop(
            lambda net: net(x).sum(), todist.sgd(lr=0.1), net, 1, adjoint=adjoint
        ).params
        torch.autograd.grad(moved(x).sum(), net[0].weight)

    def freed(adjoint: Any) -> int:
        adapt(adjoint)  # torch loads what it needs
        # Smaller than what glibc may ask the system for one by one.
        held = [ctypes.c_void_p(library.malloc(100_000)) for _ in range(1000)]
        for one in held:
            ctypes.memset(one, 1, 100_000)
        for one in held[::2]:
            library.free(one)
        monkeypatch.setattr(resources, "_resident_then", 0)
        before = resources.resident()
        adapt(adjoint)
        less = before - resources.resident()
        for one in held[1::2]:
            library.free(one)
        return less

    assert freed(todist.Replayed(blocks=net)) > 40_000_000
    assert freed(todist.Replayed()) < 10_000_000  # not where memory is worth less than time


class Skipping(nn.Module):
    """Calls its layers in an order of its own."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        one, two, three = self.layers
        return {
            "beside": lambda: one(x) + two(x) + three(x),
            "glue": lambda: three(torch.tanh(two(one(x)))),
            "order": lambda: three(one(two(x))),
            "left out": lambda: two(one(x)),
            "none": lambda: x * one.weight.sum(),
        }[self.way]()


@each_row("way", ["beside", "glue", "order", "left out", "none"])
def test_blocks_are_called_as_the_loss_likes(way):
    net = Skipping(way).double()
    x = torch.randn(4, 2, dtype=D)
    agree(lambda net: net(x).square().sum(), net, blocks=net.layers)


class Strange(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return {"out": super().forward(x), "what": object()}


def test_a_block_that_returns_what_cannot_be_cut_is_named():
    net = nn.Sequential(Strange(2, 2))
    with pytest.raises(TypeError, match="trees of tensors and numbers, got a object from block '0'"):
        todist.inner_loop(
            lambda net: net(torch.ones(2))["out"].sum(), todist.sgd(lr=0.1), net, 1,
            adjoint=todist.Replayed(blocks=net),
        )  # fmt: skip


@each_row(
    ("params", "blocks", "text"),
    [
        (torch.ones(2, requires_grad=True), "auto", "need `params` to be a module, .* got a tree"),
        (nn.Linear(2, 2), "auto", "a Linear has none: give its blocks"),
        (nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)), "got a Sequential that is not in it"),
        (Stack(), "empty", "must have modules in it, got an empty ModuleList"),
    ],
)
def test_blocks_that_are_none(params, blocks, text):
    if blocks == "empty":
        params.nothing = blocks = nn.ModuleList()
    with pytest.raises(ValueError, match=text):
        todist.inner_loop(lambda p: p, todist.sgd(lr=0.1), params, 1, adjoint=todist.Replayed(blocks=blocks))


def test_a_tensor_that_only_a_block_uses_must_be_declared():
    class Hidden(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * SCALE

    net = nn.Sequential(Hidden(2, 2), nn.Linear(2, 2)).double()
    x = torch.ones(1, 2, dtype=D)
    with pytest.raises(ValueError, match=r"`meta` must list .* it lacks 1, of shape \(\)"):
        todist.inner_loop(
            lambda net: net(x).sum(), todist.sgd(lr=0.1), net, 1, adjoint=todist.Replayed(blocks=net)
        )


def test_few_copies_of_the_parameters_are_held_at_a_time():
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(16)))
    x, lr = torch.randn(2, 64), torch.tensor(1e-3, requires_grad=True)

    def peak(steps: int) -> float:
        with PeakMemory() as memory:
            moved = todist.inner_loop(
                lambda net: net(x).square().mean(),
                todist.adam(lr=lr),
                net,
                steps,
                adjoint=todist.Replayed(snapshots=1, blocks="auto"),
            ).params
            torch.autograd.grad(moved(x).sum(), lr)
        return memory.peak / sum(p.numel() * p.element_size() for p in net.parameters())

    peak(1)
    # The most is held when the update of a step has been recorded. There are the caller's parameters, the first state
    # (2), the last parameters and their gradients, what the step starts from (3), its gradient, what the update makes
    # (5, since `lr` is a tensor), and the gradients of what it makes (3).
    assert peak(4) < 1 + 2 + 1 + 1 + 3 + 1 + 5 + 3 + 0.1
    assert peak(16) < peak(4) + 0.1


class _Cache:
    def __init__(self):
        self.keys = None

    def update(self, keys):
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys])
        return self.keys


class _WithCache(nn.Module):
    """As a block of Hugging Face's: its second call finds twice as many keys as the mask is for."""

    def __init__(self):
        super().__init__()
        self.key = nn.Linear(4, 4, dtype=D)

    def forward(self, x, mask, cache):
        keys = cache.update(self.key(x).detach())
        return self.key(x) + torch.softmax(x @ keys.T + mask, -1) @ keys


def test_a_cache_that_grows_is_told_with_the_block_and_the_remedy():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([_WithCache() for _ in range(2)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x, torch.zeros(3, 3, dtype=D), _Cache())
            return x

    net, x = Model(), torch.randn(3, 4, dtype=D)
    with pytest.raises(RuntimeError, match="must match the size of tensor") as caught:
        gradients_of(
            todist.Replayed(blocks="auto"), lambda net: net(x).square().mean(), net, 2, list(net.parameters())
        )
    assert any(
        "calls block 'layers." in note and "`use_cache=False`" in note for note in caught.value.__notes__
    )
