"""Each adjoint has the gradient it stands for: adjoint, optimizer, what the gradient is for; against loops by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchopt_dist as todist
from tests.diff.adjoint_table import ADJOINTS, ALL, ESTIMATORS, EXACT, OPTIMIZERS, STEPS, Problem, gradients
from tests.rows import each_row

KINDS = ["tree", "module"]


@each_row("kind", KINDS)
@each_row("optimizer", OPTIMIZERS)
@each_row("name", ADJOINTS)
def test_gradients_are_those_of_the_loop_by_hand(name, optimizer, kind):
    problem, row = Problem(kind, optimizer), ADJOINTS[name]
    params, losses = problem.by_hand(row)
    result = problem.run(row.adjoint)
    torch.testing.assert_close(result.losses, torch.stack(losses), rtol=0, atol=1e-12)
    expected = gradients(problem.outer(params), problem.tensors())
    found = gradients(problem.outer(result.params), problem.tensors())
    for what, gradient in expected.items():
        if gradient is None:
            assert found[what] is None or not found[what].any(), what
        else:
            torch.testing.assert_close(found[what], gradient, rtol=1e-10, atol=1e-10)


@each_row("kind", KINDS)
def test_reptile_is_the_displacement(kind):
    problem = Problem(kind, "adam")
    result = problem.run(todist.Reptile())
    last = dict(result.params.named_parameters()) if kind == "module" else result.params
    found = gradients(problem.outer(result.params), problem.tensors())
    for name, first in problem.net.named_parameters():
        torch.testing.assert_close(found[f"first {name}"], (first - last[name]).detach(), rtol=0, atol=0)
        assert found[f"first {name}"].any()
        del found[f"first {name}"]
    assert all(gradient is None for gradient in found.values())


def test_a_second_derivative_of_reptile_is_refused():
    problem = Problem("tree", "adam")
    first = list(problem.net.parameters())
    found = torch.autograd.grad(problem.outer(problem.run(todist.Reptile()).params), first, create_graph=True)
    with pytest.raises(NotImplementedError, match="`Reptile` is an estimate"):
        sum(g.sum() for g in found).backward()


@each_row("name", ALL)
def test_values_are_the_same_for_all(name):
    adjoint = ALL[name]
    problem = Problem("tree", "adam")
    expected, found = problem.run(todist.Recorded()), problem.run(adjoint)
    torch.testing.assert_close(found.params, expected.params, rtol=0, atol=1e-14)
    torch.testing.assert_close(found.losses, expected.losses, rtol=0, atol=1e-14)
    leaves, like = todist.pytree.flatten(found.state)[0], todist.pytree.flatten(expected.state)[0]
    torch.testing.assert_close(leaves, like, rtol=0, atol=1e-14)


def test_a_module_is_left_as_it_is_and_buffers_go_from_step_to_step():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1)).double()
    xs = [torch.randn(6, 3, dtype=torch.float64) for _ in range(3)]
    before = {name: value.clone() for name, value in net.state_dict().items()}
    result = todist.inner_loop(lambda net, x: net(x).square().mean(), todist.sgd(lr=0.1), net, xs, seed=3)
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])
    copy = todist.module_clone(net, by="deepcopy")
    optimizer = todist.SGD(copy.parameters(), lr=0.1)
    for number, x in enumerate(xs):
        torch.manual_seed((3 + number * 0x9E3779B97F4A7C15) % 2**63)
        optimizer.zero_grad()
        copy(x).square().mean().backward()
        optimizer.step()
    for name, value in result.params.state_dict().items():
        torch.testing.assert_close(value, copy.state_dict()[name], rtol=0, atol=1e-12)
    assert result.params[1].num_batches_tracked == 3


@each_row("name", ALL)
@pytest.mark.filterwarnings("ignore:nothing gets a gradient")
def test_frozen_and_tied_parameters(name):
    adjoint = ALL[name]
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2), nn.Linear(2, 2)).double()
    net[2].weight = net[0].weight
    net[3].requires_grad_(False)
    x = torch.randn(4, 2, dtype=torch.float64)
    adapted = todist.inner_loop(
        lambda net, _: net(x).square().mean(), todist.adam(lr=0.1), net, [None] * 2, adjoint=adjoint
    ).params
    assert adapted[2].weight is adapted[0].weight
    assert adapted[3].weight is net[3].weight
    assert not torch.equal(adapted[0].weight, net[0].weight)
    w = torch.randn(2, dtype=torch.float64, requires_grad=True)
    fixed = torch.ones(2, dtype=torch.float64)
    moved = todist.inner_loop(
        lambda p: (p["a"] * p["b"] * p["c"]).sum(),
        todist.sgd(lr=0.1),
        {"a": w, "b": w, "c": fixed},
        2,
        adjoint=adjoint,
    ).params
    assert moved["a"] is moved["b"]
    torch.testing.assert_close(moved["a"], w.detach() * 0.8**2)
    assert torch.equal(moved["c"], fixed)


def test_the_first_parameters_may_be_in_the_loss_in_another_role():
    first = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    expected = None
    for adjoint in (todist.Recorded(), todist.Truncated(5)):
        moved = todist.inner_loop(
            lambda w: w * first**2, todist.sgd(lr=0.1), first, 3, meta=first, adjoint=adjoint
        ).params
        torch.testing.assert_close(moved.item(), 2 - 0.3 * 4)
        expected = 1 - 0.3 * 2 * 2
        torch.testing.assert_close(torch.autograd.grad(moved, first)[0].item(), expected)


@each_row("name", ALL)
@pytest.mark.filterwarnings("ignore:.Implicit.* gives no gradient")  # to the rate
def test_a_predicate_ends_the_loop(name):
    adjoint = ALL[name]
    w = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    lr = torch.tensor(0.25, dtype=torch.float64, requires_grad=True)
    told = []

    def stop(number, loss):
        told.append((number, loss.item()))
        return loss < 0.1

    result = todist.inner_loop(lambda w: w**2, todist.sgd(lr=lr), w, 9, stop=stop, adjoint=adjoint)
    assert told[:3] == [(0, 1.0), (1, 0.25), (2, 0.0625)]
    assert result.losses.tolist() == [1.0, 0.25, 0.0625]
    assert result.params.item() == 0.125
    found = torch.autograd.grad(result.params, (w, lr), allow_unused=True)
    if "evolution" in name:
        assert found[0] is None
        assert found[1] is not None
        assert len(told) == 3
        return
    expected = {  # of w * (1 - 2 lr)**3; truncated: through two steps from 0.5
        "truncated": (None, -4 * 0.5 * 0.5),
        "first order": (1.0, -2 * (1 + 0.5 + 0.25)),
        "reptile": (1 - 0.125, None),
        "finite difference": (None, -2 * 0.25),
        "SAMA": (None, -2 * 0.25),
        "implicit": (None, None),  # the minimum is where it is
    }.get(name, (0.125, -6 * 0.25))
    assert tuple(None if g is None else g.item() for g in found) == pytest.approx(expected)


def test_batches_are_a_sequence_a_function_a_tensor_or_a_number():
    xs = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    w = torch.zeros((), dtype=torch.float64, requires_grad=True)

    def adapted(batches, **options):
        result = todist.inner_loop(lambda w, x: (w - x) ** 2, todist.sgd(lr=0.25), w, batches, **options)
        return torch.autograd.grad(result.params, xs)[0].tolist()

    expected = [0.125, 0.25, 0.5]
    assert adapted(list(xs)) == expected
    assert adapted(xs) == expected
    assert adapted(lambda number: xs[number], steps=3, meta=xs) == expected
    assert adapted(xs, steps=2) == [0.25, 0.5, 0.0]
    plain = todist.inner_loop(lambda w: w + 0.0, todist.sgd(lr=1.0), w, 3).params
    assert plain.item() == -3.0


def test_aux_comes_back_a_step_and_random_numbers_are_seeded():
    w = torch.zeros(3, dtype=torch.float64, requires_grad=True)

    def loss(w):
        noise = torch.rand(3, dtype=torch.float64)
        return (w * noise).sum(), {"noise": noise, "name": "noise"}

    def run(**options):
        torch.manual_seed(5)
        result = todist.inner_loop(loss, todist.sgd(lr=1.0), w, 3, has_aux=True, **options)
        return result, torch.rand(())

    first, after = run()
    again, _ = run(adjoint=todist.FirstOrder())
    assert [aux["noise"].tolist() for aux in first.aux] == [aux["noise"].tolist() for aux in again.aux]
    assert len({tuple(aux["noise"].tolist()) for aux in first.aux}) == 3
    assert first.aux[0]["name"] == "noise"
    torch.testing.assert_close(first.params, -sum(aux["noise"] for aux in first.aux))
    other, after_other = run(seed=7)
    assert not torch.equal(other.params, first.params)
    torch.manual_seed(5)
    assert torch.rand(()) == after_other  # a given seed leaves the generator alone
    assert after != after_other


@each_row("name", ALL)
def test_nothing_is_recorded_without_grad_mode(name):
    problem = Problem("module", "momentum")
    with torch.no_grad():
        result = problem.run(ALL[name])
    assert len(result.losses) == STEPS
    assert all(p.grad_fn is None for p in result.params.parameters())


@each_row("kind", KINDS)
@each_row("name", ALL)
def test_a_loop_goes_on_from_another_one_without_grad_mode_too(name, kind):
    def loop(problem):
        first = problem.run(ALL[name])
        problem.params, state = first.params, first.state
        return problem.run(ALL[name], state=state)

    with torch.no_grad():
        plain = loop(Problem(kind, "momentum"))
    torch.testing.assert_close(plain.losses, loop(Problem(kind, "momentum")).losses.detach())


@each_row("name", ADJOINTS)
def test_losses_are_connected_where_the_adjoint_is_exact(name):
    problem, row = Problem("tree", "adam"), ADJOINTS[name]
    result = problem.run(row.adjoint)
    if row.constant_gradients:
        assert not result.losses.requires_grad
        return
    _, losses = problem.by_hand(row)
    steps = 2 if name == "truncated" else STEPS
    expected = gradients(sum(losses[-steps:]), problem.tensors())
    found = gradients(result.losses[-steps:].sum(), problem.tensors())
    for what, gradient in expected.items():
        assert (found[what] is None) == (gradient is None), what
        if gradient is not None:
            torch.testing.assert_close(found[what], gradient, rtol=1e-10, atol=1e-10)


def _run(**changed):
    w = torch.ones(2, requires_grad=True)
    given = {
        "loss": lambda w, x: (w * x).sum(),
        "optimizer": todist.sgd(lr=0.1),
        "params": w,
        "batches": [torch.ones(2)] * 3,
        **changed,
    }
    return todist.inner_loop(
        given.pop("loss"), given.pop("optimizer"), given.pop("params"), given.pop("batches"), **given
    )


@each_row(
    ("changed", "error", "text"),
    [
        ({"loss": 3}, TypeError, "`loss` must be a function, got int"),
        ({"loss": lambda w, x: w * x}, ValueError, r"`loss` must .* one element, got shape \(2,\)"),
        ({"loss": lambda w, x: 1.0}, TypeError, "`loss` must return a tensor, got float"),
        ({"loss": lambda w, x: x.sum()}, ValueError, "`loss` must depend on the parameters"),
        ({"has_aux": True}, TypeError, r"`loss` must return a pair \(loss, aux\).*got Tensor"),
        ({"optimizer": todist.SGD}, TypeError, "`optimizer` .*got the class SGD: call it"),
        ({"params": torch.ones(2)}, ValueError, "`params` must have a tensor that requires grad, got 1"),
        ({"params": {"w": 1.0}}, TypeError, "`params` must be a module or a tree of tensors, got a float"),
        ({"params": nn.Tanh()}, ValueError, "`params` must have parameters, got Tanh with none"),
        (
            {"batches": iter([1]), "adjoint": todist.Replayed()},
            TypeError,
            r"`batches` .* read again.*got list_iterator: `list\(...\)`",
        ),
        (
            {"batches": torch.utils.data.DataLoader([torch.ones(2)] * 3), "adjoint": todist.Replayed()},
            TypeError,
            r"`batches` .* read again.*got DataLoader: `list\(...\)`",
        ),
        ({"batches": 2.5}, TypeError, "`batches` must be .*got float$"),
        ({"batches": -1}, ValueError, "`batches` as a number of steps must be at least 0, got -1"),
        ({"batches": lambda n: n}, ValueError, "`steps` must say how many steps"),
        ({"steps": 4}, ValueError, "`steps` is 4, and there are 3"),
        ({"steps": 1.5}, TypeError, "`steps` must be an integer, got float"),
        ({"meta": "weights"}, TypeError, "`meta` must be a tree of tensors and modules, got a str"),
        ({"adjoint": "recorded"}, TypeError, "`adjoint` must be an adjoint.*got str"),
        ({"adjoint": todist.FirstOrder}, TypeError, "got the class FirstOrder: call it"),
        ({"stop": 3}, TypeError, "`stop` must be a function"),
        ({"seed": 0.5}, TypeError, "`seed` must be an integer, got float"),
    ],
)
def test_bad_input(changed, error, text):
    with pytest.raises(error, match=text):
        _run(**changed)


def test_bad_settings_of_truncated():
    with pytest.raises(TypeError, match="`steps` must be an integer, got float"):
        todist.Truncated(1.5)
    with pytest.raises(ValueError, match="`steps` must be at least 0, got -1"):
        todist.Truncated(-1)


class _EndsEarly:
    def __len__(self):
        return 3

    def __getitem__(self, number):
        if number == 2:
            raise IndexError
        return torch.ones(2)


def test_batches_that_end_early():
    with pytest.raises(
        ValueError, match="`batches` must have one batch for each step: they ended at step 2 of 3"
    ):
        _run(batches=_EndsEarly())


@each_row("name", ["recorded", "truncated", "first order", "reptile", *ESTIMATORS])
@pytest.mark.filterwarnings("ignore:.Implicit.* gives no gradient")  # to the rate
def test_tasks_in_vmap_have_the_gradients_of_tasks_in_a_loop(name):
    damped = todist.linear_solve.solve_cg(ridge=5.0, rtol=1e-13)  # the network is not convex
    adjoint = todist.Implicit(damped, not_converged="ignore") if name == "implicit" else ALL[name]
    problem = Problem("module", "adam")
    xs = torch.stack(problem.xs).detach()
    ys = torch.randn(4, 5, 1, dtype=torch.float64)
    scales = (0.5 + torch.rand(4, dtype=torch.float64)).requires_grad_()
    shifts = torch.rand(2, 4, dtype=torch.float64, requires_grad=True) * 1.0
    ins = [*problem.net.parameters(), problem.weights, problem.lr, scales, shifts]

    def task(x, y, scale, shift):
        def loss(net):
            return (problem.weights * (net(x) - y).squeeze(1) ** 2).mean() * scale + shift @ net[0].weight[
                :2, 0
            ]

        adapted = todist.inner_loop(
            loss,
            problem.optimizer,
            problem.net,
            3,
            meta=(problem.weights, scale, shift),
            adjoint=adjoint,
            seed=0,
        )
        outer = (adapted.params(x) - y).square().mean()
        return outer + adapted.losses[1:].sum() if "evolution" in name else outer

    torch.manual_seed(0)  # directions of tasks in `vmap` are drawn in the order of the tasks
    one_by_one = torch.stack([task(*one) for one in zip(xs, ys, scales, shifts.T, strict=True)])
    torch.manual_seed(0)
    at_once = torch.func.vmap(task, in_dims=(0, 0, 0, 1))(xs, ys, scales, shifts)
    torch.testing.assert_close(at_once, one_by_one, rtol=0, atol=1e-12)
    expected = torch.autograd.grad((one_by_one**2).sum(), ins, allow_unused=True)
    found = torch.autograd.grad((at_once**2).sum(), ins, allow_unused=True)
    assert any(grad is not None and grad.any() for grad in expected)
    for one, other in zip(found, expected, strict=True):
        if one is None or other is None:
            assert one is None or not one.any()
            assert other is None or not other.any()
        else:
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@each_row("name", ["recorded", "replayed", "truncated", "first order", "reptile", *ESTIMATORS])
def test_in_vmap_a_parameter_stays_in_steps_that_do_not_use_it(name):
    params = {key: torch.ones(2, dtype=torch.float64, requires_grad=True) for key in ("always", "once")}
    weight = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    xs = torch.randn(2, 2, dtype=torch.float64)

    def task(x):
        def loss(params, number):
            of_one = (params["once"] - 2 * x).square().sum() if number == 1 else 0.0
            return weight * (params["always"] - x).square().sum() + of_one

        adapted = todist.inner_loop(
            loss, todist.adamw(lr=0.1), params, range(3), meta=(weight, x), adjoint=ALL[name], seed=0
        ).params
        return torch.cat([adapted["always"], adapted["once"]])

    one_by_one = torch.stack([task(x) for x in xs])
    torch.testing.assert_close(torch.vmap(task)(xs), one_by_one, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="`loss` must depend on the parameters"):
        torch.vmap(lambda x: todist.inner_loop(lambda w: x.sum(), todist.sgd(0.1), x, 1).params)(xs)


class _OfOne(torch.autograd.Function):
    """A product with a gradient for one factor only."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a, b):
        return a * b

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, bar):
        return bar * ctx.saved_tensors[0], None


def test_in_vmap_a_parameter_stays_to_which_a_function_gives_no_gradient():
    params = {key: torch.ones(2, dtype=torch.float64, requires_grad=True) for key in ("a", "b")}
    xs = torch.randn(3, 2, dtype=torch.float64)

    def task(x):
        def loss(params):
            return (_OfOne.apply(params["a"], params["b"]) - x).square().sum()

        return todist.inner_loop(loss, todist.adamw(lr=0.1, weight_decay=0.5), params, 2).params

    adapted, one_by_one = torch.vmap(task)(xs), [task(x) for x in xs]
    for key in params:
        expected = torch.stack([one[key] for one in one_by_one])
        torch.testing.assert_close(adapted[key].expand_as(expected), expected, rtol=0, atol=1e-12)
    assert (one_by_one[0]["b"] == 1).all()


def test_recorded_loops_in_transforms_of_torch_func():
    xs = torch.randn(3, 5, 2, dtype=torch.float64)
    p = torch.randn(2, 1, dtype=torch.float64)
    lr = torch.tensor(0.1, dtype=torch.float64)

    def outer(lr, p):
        adapted = todist.inner_loop(
            lambda p, x: (x @ p).square().mean(), todist.sgd(lr=lr, momentum=0.9), p, list(xs), meta=p
        )
        return (adapted.params**3).sum()

    given = lr.clone().requires_grad_(), p.clone().requires_grad_()
    expected = torch.autograd.grad(outer(*given), given)
    torch.testing.assert_close(torch.func.grad(outer, argnums=(0, 1))(lr, p), expected)
    torch.testing.assert_close(torch.func.jacrev(outer, argnums=(0, 1))(lr, p), expected)


def test_adjoints_without_forward_mode_say_so():
    with pytest.raises(
        NotImplementedError, match=r"an inner loop with todist\.FirstOrder has no forward-mode"
    ):
        torch.func.jvp(
            lambda w: (
                todist.inner_loop(
                    lambda w: w**2, todist.sgd(lr=0.1), w, 2, adjoint=todist.FirstOrder()
                ).params
            ),
            (torch.ones(()),),
            (torch.ones(()),),
        )


class _Checkpointed(nn.Module):
    def __init__(self, checkpoints):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 1)
        self.checkpoints = checkpoints

    def forward(self, x):
        if self.checkpoints:
            return self.last(checkpoint(lambda x: torch.tanh(self.first(x)), x, use_reentrant=False))
        return self.last(torch.tanh(self.first(x)))


@each_row("name", ADJOINTS)
def test_checkpoints_in_a_module_are_computed_with_the_parameters_of_the_step(name):
    def found(checkpoints):
        torch.manual_seed(0)
        net = _Checkpointed(checkpoints).double()
        x = torch.randn(5, 3, dtype=torch.float64)
        lr = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
        adapted = todist.inner_loop(
            lambda net: net(x).square().mean(), todist.sgd(lr=lr), net, 4, adjoint=ADJOINTS[name].adjoint
        )
        return torch.autograd.grad(adapted.params(x).sum(), lr)[0]

    torch.testing.assert_close(found(True), found(False), rtol=1e-12, atol=0)


@each_row("optimizer", OPTIMIZERS)
@each_row("name", ["recorded", "replayed", "replayed from snapshots", "truncated", "first order"])
def test_a_loss_whose_gradient_torch_has_no_memory_for(name, optimizer):
    found = []
    for function in (torch.sgn, torch.sign):  # the second one has a gradient of zeros
        w = torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True)
        lr = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
        made = todist.inner_loop(
            lambda w, function=function: function(w).sum() + 0 * w.sum() + w[0] ** 2,
            OPTIMIZERS[optimizer](lr),
            w,
            2,
            adjoint=ALL[name],
        ).params
        plain = todist.inner_loop(
            lambda w, function=function: function(w).sum(), OPTIMIZERS[optimizer](lr), w, 2, adjoint=ALL[name]
        ).params
        grads = torch.autograd.grad((made + plain).sum(), (w, lr), materialize_grads=True, allow_unused=True)
        found.append([made, plain, *grads])
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-12)


@each_row(
    "adjoint",
    [
        todist.Recorded(),
        todist.Replayed(),
        todist.FirstOrder(),
    ],
)
def test_a_table_with_sparse_gradients_has_those_of_a_dense_one(adjoint):
    torch.manual_seed(0)
    words, lr = (
        torch.arange(15).remainder(7).reshape(5, 3),
        torch.tensor(0.5, dtype=torch.float64, requires_grad=True),
    )
    net = nn.Sequential(nn.Embedding(7, 3), nn.Tanh(), nn.Flatten(), nn.Linear(9, 1)).double()

    def gradients(sparse: bool) -> list[torch.Tensor]:
        net[0].sparse = sparse
        result = todist.inner_loop(
            lambda net: (net(words) - 1).square().mean(), todist.sgd(lr=lr), net, 2, adjoint=adjoint
        )
        value = (result.params(words[:3]) - 2).square().mean()
        return [grad.to_dense() for grad in torch.autograd.grad(value, [*net.parameters(), lr])]

    torch.testing.assert_close(gradients(True), gradients(False), rtol=1e-12, atol=1e-13)


def test_a_loss_may_have_gradients_in_it_and_leaves_of_its_own():
    """As a penalty on the gradients of features and weights, which depend on a perturbation that the loss has made."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x, weights = torch.randn(5, 3).double(), torch.ones(5, 1).double().requires_grad_()

    def loss(net):
        perturbed = net[0](x) + torch.zeros(5, 4, dtype=torch.float64, requires_grad=True)
        errors = net[2](net[1](perturbed)) ** 2
        of_features, of_weights = torch.autograd.grad(
            (weights * errors).sum(), (perturbed, net[0].weight), create_graph=True
        )
        return (weights * errors).mean() + of_features.square().mean() + of_weights.square().mean()

    found = {}
    for name, adjoint in ALL.items():
        made = todist.inner_loop(
            loss, todist.adam(lr=0.05, eps=1e-3), net, 3, meta=weights, adjoint=adjoint, seed=1
        )
        if name != "implicit":  # not at a minimum
            outer = made.params(x).square().mean()
            (found[name],) = torch.autograd.grad(outer, weights, allow_unused=True)
    for name in EXACT:
        torch.testing.assert_close(found[name], found["recorded"], rtol=1e-10, atol=1e-13)
