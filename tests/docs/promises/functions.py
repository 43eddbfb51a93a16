"""``docs/api``'s pages of optimizers, solvers and tools: each line, computed by hand or by torch."""

from __future__ import annotations

import math
import pickle
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchopt_dist as todist
from tests.docs.promises.register import numbers, promises, same
from tests.optim.table import ROWS
from torchopt_dist import linalg, linear_solve, nonlinear_solve, ops, pytree, schedule
from torchopt_dist.diff.implicit import custom_fixed_point, custom_root
from torchopt_dist.diff.zero_order import zero_order

optimizers, solvers, tools = (partial(promises, page) for page in ("optimizers", "solvers", "tools"))
G = numbers(3.0, -4.0)
P = numbers(1.0, 2.0)


# Optimizers.


def moved(optimizer: Any, params: Any, grads: Any) -> Any:
    for grad in grads:
        params.grad = grad.clone()
        optimizer.step()
    return params.detach()


TORCH_ALONE = {"Adafactor": {"lr": 0.1}, "Muon": {"lr": 0.1, "ns_steps": 3}}
"""Optimizers that the table of the tests lacks, with options; the oldest torch has none of the second name."""


@optimizers(
    *(face for name in [*ROWS, *TORCH_ALONE] for face in (name.lower(), name, f"Meta{name}")),
)
def three_faces_of_the_formula() -> None:
    """``as torch.optim.X``, with X or an independent twin of the tests, and the three faces agree."""
    weight = torch.arange(1.0, 5.0, dtype=torch.float64).view(2, 2)
    rows: dict[str, Any] = {name: (row.twin, next(iter(row.options.values()))) for name, row in ROWS.items()}
    for name, options in TORCH_ALONE.items():
        if hasattr(torch.optim, name):
            rows[name] = getattr(torch.optim, name), options
    for name, (twin, options) in rows.items():
        given = {key: value for key, value in options.items() if key != "fused"}
        grads = [weight.cos(), weight.sin(), weight - 2.5]
        first, second = (nn.Parameter(weight.clone()) for _ in range(2))
        expected = moved(twin([first], **given), first, grads)
        tolerance: dict[str, float] = (
            {"rtol": 1e-2, "atol": 1e-2} if name == "Muon" else {}
        )  # torch's computes in bfloat16
        same(moved(getattr(todist, name)([second], **given), second, grads), expected, **tolerance)

        link = getattr(todist, name.lower())(**given)
        params, state = [weight.clone()], link.init([weight])
        net = nn.Linear(2, 2, bias=False).double()
        with torch.no_grad():
            net.weight.copy_(weight)
        meta = getattr(todist, f"Meta{name}")(net, **given)
        for grad in grads:
            updates, state = link.update([grad], state, params=params, inplace=False)
            params = [params[0] + updates[0]]
            meta.step((net.weight * grad).sum())
        same(params[0], expected, **tolerance)
        same(net.weight.detach(), expected, **tolerance)
        assert net.weight.grad_fn is not None  # one can differentiate through it


@optimizers("Optimizer", "MetaOptimizer", "FuncOptimizer", "apply_updates", "chain")
def a_transformation_in_three_holders() -> None:
    link = todist.chain(todist.transform.scale(2.0), todist.transform.scale(-0.1))
    param = nn.Parameter(P.clone())
    optimizer = todist.Optimizer([param], link)
    assert isinstance(optimizer, torch.optim.Optimizer)
    same(moved(optimizer, param, [G]), P - 0.2 * G)

    net = nn.Linear(2, 1, bias=False).double()
    start = net.weight
    todist.MetaOptimizer(net, link).step((net.weight * G).sum())
    same(torch.autograd.grad(net.weight.sum(), start)[0], torch.ones(1, 2))
    same(net.weight, start - 0.2 * G)

    holder, mine = todist.FuncOptimizer(link), P.clone().requires_grad_()
    same(holder.step((mine * G).sum(), mine), P - 0.2 * G)
    same(todist.apply_updates(P, G, inplace=False), P + G)


@optimizers("differentiable", "typing.DifferentiableOptimizer")
def torch_s_formula() -> None:
    net, twin = (nn.Linear(2, 1, bias=False).double() for _ in range(2))
    twin.load_state_dict(net.state_dict())
    start = net.weight
    meta = todist.differentiable(torch.optim.Adam, net, lr=0.1)
    assert isinstance(meta, todist.MetaOptimizer)
    assert isinstance(meta, todist.typing.DifferentiableOptimizer)
    meta.step((net.weight * G).sum())
    moved(torch.optim.Adam(twin.parameters(), lr=0.1), twin.weight, [G[None]])
    same(net.weight.detach(), twin.weight.detach())
    same(torch.autograd.grad(net.weight.sum(), start)[0], torch.ones(1, 2))


@optimizers("learned", "nn.LearnedHyperparameters")
def positive_in_log_space() -> None:
    hyper = todist.learned(nn.Linear(2, 1), lr=0.1)
    assert isinstance(hyper, todist.nn.LearnedHyperparameters)
    for logarithm in hyper.parameters():
        same(logarithm.detach(), torch.full_like(logarithm, math.log(0.1)), rtol=1e-6, atol=0)
        logarithm.data -= 1000.0
    assert all((value >= 0).all() for value in pytree.flatten(hyper())[0])


@optimizers("ScheduleLR")
def of_each_group() -> None:
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(P)]}, {"params": [nn.Parameter(P)]}], lr=9.0)
    scheduler = schedule.ScheduleLR(optimizer, [lambda step: step + 1.0, lambda step: step + 5.0])
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [2.0, 6.0]


@optimizers(*(name for name in schedule.__all__ if name != "ScheduleLR"))
def schedules() -> None:
    def values(chosen: Any, *steps: int) -> list[float]:
        return [float(chosen(step)) for step in steps]

    half = 0.5 * (1 + math.cos(math.pi / 4))
    same(values(schedule.cosine_decay(2.0, 8, 0.1), 0, 2, 8, 99), [2.0, 2 * (0.9 * half + 0.1), 0.2, 0.2])
    same(values(schedule.exponential_decay(2.0, 0.5, 0, 2), 0, 2, 4), [2.0, 1.0, 0.5])
    line = schedule.linear_schedule(0.0, 4.0, 4)
    same(values(line, 0, 1, 4, 9), [0.0, 1.0, 4.0, 4.0])
    same(values(schedule.polynomial_schedule(0.0, 4.0, 1.0, 4), *range(6)), values(line, *range(6)))
    same(values(schedule.polynomial_schedule(0.0, 4.0, 2.0, 4), 2), [4.0 - 4.0 * 0.25])
    same(values(schedule.join_schedules([line, line], [3]), 2, 3, 4), [2.0, 0.0, 1.0])
    cycle = values(schedule.one_cycle(1.0, 10, 0.3, 4.0, 100.0), 0, 3, 10)
    same(cycle, [0.25, 1.0, 0.0025])
    same(values(schedule.warmup_cosine(0.0, 1.0, 2, 10, 0.2), 0, 1, 2, 10), [0.0, 0.5, 1.0, 0.2])

    param = nn.Parameter(P)
    optimizer = torch.optim.SGD([param], lr=1.0)
    torch_s = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.1)
    expected = []
    for _ in range(6):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        torch_s.step()
    same(values(schedule.piecewise_constant_schedule(1.0, {2: 0.1, 4: 0.1}), *range(6)), expected)


@optimizers("AdamOp", "accelerated_op_available", "is_available", "why_not")
def kernels() -> None:
    first = torch.zeros(2, dtype=torch.float64)
    *_, updates = ops.AdamOp(0.8, 0.9, 0.1)(first, first.clone(), G, torch.tensor(1))
    same(updates, G / (G.abs() + 0.1))
    for op in ("adam", "sgd"):
        assert ops.is_available(op) == (ops.why_not(op) is None)
    assert ops.accelerated_op_available("cpu") == ops.is_available("adam")
    assert "cuda" in str(ops.why_not("adam", "cuda")).lower() or ops.is_available("adam", "cuda")


# Solvers.

A = torch.tensor([[4.0, 1.0], [1.0, 3.0]], dtype=torch.float64)
SKEW = torch.tensor([[4.0, 1.0], [-2.0, 3.0]], dtype=torch.float64)


@solvers("custom_root", "custom_fixed_point", "Adjoint")
def by_the_equation() -> None:
    @custom_root(lambda x, theta: x**3 - theta, argnums=1)
    def cube_root(init: Tensor, theta: Tensor) -> Tensor:
        return theta.detach() ** (1 / 3)

    @custom_fixed_point(lambda x, theta: 0.5 * (x + theta / x), argnums=1)
    def square_root(init: Tensor, theta: Tensor) -> Tensor:
        return theta.detach().sqrt()

    theta = numbers(8.0).requires_grad_()
    same(torch.autograd.grad(cube_root(theta, theta).sum(), theta)[0], numbers(1 / 12))
    same(torch.autograd.grad(square_root(theta, theta).sum(), theta)[0], 0.5 * numbers(8.0).rsqrt())


@solvers("zero_order", "Method")
def from_values_alone() -> None:
    theta, noise = P.clone().requires_grad_(), numbers(0.5, -1.0)

    def value(x: Tensor) -> Tensor:
        return (x.detach() ** 3).sum()

    there, here, opposite = value(P + 0.1 * noise), value(P), value(P - 0.1 * noise)
    for method, difference in (
        ("naive", there),
        ("forward", there - here),
        ("antithetic", (there - opposite) / 2),
    ):
        loss = zero_order(lambda shape: noise.expand(shape), method=method, num_samples=1, sigma=0.1)(value)
        same(torch.autograd.grad(loss(theta), theta)[0], difference * noise / 0.1)


@solvers(
    "Solver",
    "SolverInfo",
    "solve_cg",
    "solve_bicgstab",
    "solve_gmres",
    "solve_inv",
    "solve_neumann",
    "solve_normal_cg",
)
def linear_systems() -> None:
    loose: Any = {"rtol": 1e-12}
    for make, matrix in (
        (linear_solve.solve_cg(**loose), A),
        (linear_solve.solve_bicgstab(**loose), SKEW),
        (linear_solve.solve_gmres(**loose), SKEW),
        (linear_solve.solve_inv(), SKEW),
        (linear_solve.solve_normal_cg(**loose), SKEW),
        (linear_solve.solve_neumann(alpha=0.2, **loose, maxiter=500), SKEW),
    ):
        assert isinstance(make, linear_solve.Solver)
        x, info = make.with_info(lambda v, matrix=matrix: matrix @ v, G)
        same(make(lambda v, matrix=matrix: matrix @ v, G), x, rtol=1e-7, atol=1e-7)
        same(x, torch.linalg.solve(matrix, G), rtol=1e-7, atol=1e-7)
        same(info.residual, (matrix @ x - G).norm(), rtol=1e-3, atol=1e-9)
        assert bool(info.converged)
    cut = linear_solve.solve_neumann(alpha=0.2, maxiter=2, not_converged="ignore")
    rest = torch.eye(2) - 0.2 * A
    same(cut(lambda v: A @ v, G), 0.2 * (G + rest @ G + rest @ rest @ G))
    wide = linear_solve.solve_normal_cg(ridge=0.5, rtol=1e-12)
    same(
        wide(lambda v: SKEW @ v, G),
        torch.linalg.solve(SKEW.T @ SKEW + 0.5 * torch.eye(2), SKEW.T @ G),
        rtol=1e-7,
        atol=0,
    )


@solvers("jacobi", "ConvergenceWarning")
def preconditioned_and_stopped() -> None:
    same(linear_solve.jacobi(A.diagonal())(G), G / A.diagonal())
    with pytest.warns(linear_solve.ConvergenceWarning, match="residual.*rtol"):
        linear_solve.solve_cg(maxiter=1)(lambda v: A @ v, G)


@solvers("NonlinearSolver", "NonlinearSolverInfo", "anderson", "broyden", "fixed_point_iteration", "newton")
def nonlinear_systems() -> None:
    """Their solutions are differentiated by the equation, for what the function closes over."""
    b = numbers(0.3, -0.2).requires_grad_()
    weight = 0.3 * SKEW / 4

    def cell(z: Tensor) -> Tensor:
        return torch.tanh(weight @ z + b)

    fine: Any = {"rtol": 1e-12, "atol": 1e-12}
    for solver, function in (
        (nonlinear_solve.fixed_point_iteration(**fine), cell),
        (nonlinear_solve.anderson(**fine), cell),
        (nonlinear_solve.broyden(**fine), lambda z: cell(z) - z),
        (nonlinear_solve.newton(**fine), lambda z: cell(z) - z),
    ):
        start = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        z, info = solver.with_info(function, start)
        same(cell(z), z, rtol=0, atol=1e-9)
        assert bool(info.converged)
        slope = torch.diag(1 - z.detach() ** 2)
        expected = (
            torch.linalg.solve((torch.eye(2) - slope @ weight).T, torch.ones(2, dtype=torch.float64)) @ slope
        )
        grad, of_start = torch.autograd.grad(z.sum(), (b, start), allow_unused=True)
        same(grad, expected, rtol=1e-4, atol=0)
        assert of_start is None or not of_start.any()
    damped = nonlinear_solve.fixed_point_iteration(damping=0.25, maxiter=1, not_converged="ignore")
    same(damped(lambda z: z * 0 + P, G), 0.75 * G + 0.25 * P)


@solvers("cg", "ns", "ns_inv")
def matrices() -> None:
    b = G.clone().requires_grad_()
    x = linalg.cg(A, b, rtol=1e-12)
    same(x, torch.linalg.solve(A, G), rtol=1e-7, atol=0)
    same(torch.autograd.grad(x.sum(), b)[0], torch.linalg.inv(A).sum(0), rtol=1e-4, atol=0)
    rest = torch.eye(2) - 0.2 * A
    with pytest.warns(linear_solve.ConvergenceWarning):
        series = linalg.ns(A, G, 2, alpha=0.2)
    same(series, 0.2 * (G + rest @ G + rest @ rest @ G))
    with pytest.warns(linear_solve.ConvergenceWarning):
        inverse = linalg.ns_inv(A, 2, alpha=0.2)
    same(inverse @ G, series)


# Checkpoints, data, trees, pictures.


@tools("Checkpointer", "typing.Restored")
def saved_and_restored() -> None:
    with tempfile.TemporaryDirectory() as folder:
        net = nn.Linear(2, 1)
        before = net.weight.detach().clone()
        saver = todist.Checkpointer(folder)
        saver.save(3, {"net": net})
        with torch.no_grad():
            net.weight.zero_()
        restored = saver.restore({"net": net})
        assert isinstance(restored, todist.typing.Restored)
        assert restored.step == 3
        same(net.weight.detach(), before)


@tools("scalar_writer", "typing.WriteScalars")
def numbers_by_name() -> None:
    with tempfile.TemporaryDirectory() as folder:
        with todist.scalar_writer(folder) as write:
            write(1, {"loss": 0.5})
        assert any("tfevents" in path.name for path in Path(folder).rglob("*"))
    with todist.scalar_writer(None) as write:
        write(1, {"loss": 0.5})


@tools("glyphs", "Glyphs", "GlyphSplit")
def letters() -> None:
    scripts = {"train": ["greek"], "validation": ["georgian"], "test": ["armenian"]}
    split = todist.data.glyphs(12, scripts, drawings=1, rotations=False, cache=None)
    pictures = [{image.numpy().tobytes() for image, _ in part} for part in split]
    assert all(pictures)
    assert not pictures[0] & pictures[1] | pictures[0] & pictures[2] | pictures[1] & pictures[2]
    assert isinstance(split.train, torch.utils.data.Dataset)


@tools("TaskSampler", "Task")
def few_shot_tasks() -> None:
    data = (torch.arange(20.0), torch.arange(20) // 4)
    sampler = todist.data.TaskSampler(data, 3, 1, 2)
    first, again = sampler[0], sampler[0]
    assert torch.equal(first.support, again.support)
    assert (first.support.shape, first.query.shape) == ((3,), (6,))
    pairs = zip(first.query.tolist(), first.query_labels.tolist(), strict=True)
    assert len({(label, picture // 4) for picture, label in pairs}) == 3
    assert sampler.batch(range(5)).support.shape == (5, 3)


@tools("flatten", "unflatten", "flatten_like", "is_leaf", "PyTreeSpec", "tree_map", "map_tensors")
def structure() -> None:
    tree = {"b": [G, None], "a": "text"}
    leaves, spec = pytree.flatten(tree)
    assert (leaves[0], leaves[2]) == ("text", None)
    assert leaves[1] is G
    assert isinstance(spec, pytree.PyTreeSpec)
    assert pytree.unflatten(spec, leaves)["b"][0] is G
    assert pytree.flatten_like(spec, tree, "x", "y")[1] is G
    with pytest.raises(ValueError, match="x"):
        pytree.flatten_like(spec, [G], "x", "y")
    assert pytree.is_leaf(G)
    assert not pytree.is_leaf([G])
    assert pytree.tree_map(str, {"a": None, "b": 1}) == {"a": "None", "b": "1"}
    same(pytree.map_tensors(torch.neg, tree)["b"][0], -G)
    assert pytree.map_tensors(torch.neg, tree)["a"] == "text"


@tools(
    *(
        name
        for name in pytree.__all__
        if name.startswith("tree_") and name not in {"tree_map", "tree_as_rref", "tree_to_here", "tree_wait"}
    )
)
def arithmetic() -> None:
    x, y = {"a": G, "b": [P]}, {"a": P, "b": [G]}
    z = {"a": G, "b": [G]}
    same(pytree.tree_add(x, y, z), {"a": 2 * G + P, "b": [P + 2 * G]})
    same(pytree.tree_add_scalar_mul(x, y, 3.0), {"a": G + 3 * P, "b": [P + 3 * G]})
    same(pytree.tree_sub(x, y), {"a": G - P, "b": [P - G]})
    same(pytree.tree_sub_scalar_mul(x, y, 3.0), {"a": G - 3 * P, "b": [P - 3 * G]})
    same(pytree.tree_mul(x, y, z), {"a": G * P * G, "b": [P * G * G]})
    same(pytree.tree_truediv(x, y), {"a": G / P, "b": [P / G]})
    same(pytree.tree_scalar_mul(3.0, x), {"a": 3 * G, "b": [3 * P]})
    same(pytree.tree_neg(x), {"a": -G, "b": [-P]})
    same(pytree.tree_pos(x), x)
    same(pytree.tree_matmul([A], [SKEW], [G]), [A @ SKEW @ G])
    i = torch.tensor([1.0 + 2.0j], dtype=torch.complex128)
    same(pytree.tree_vdot_real([i, G], [3 * i, P]), (15.0 + (G * P).sum()))


@tools("make_dot", "resize_graph", "NamedTensors")
def pictures() -> None:
    weight = P.clone().requires_grad_()
    dot = todist.visual.make_dot((weight * G).sum(), {"weight": weight})
    assert "MulBackward" in dot.source
    assert "weight" in dot.source
    todist.visual.resize_graph(dot)
    assert "size=" in dot.source


@tools("__version__")
def a_text() -> None:
    assert isinstance(todist.__version__, str)
    assert pickle.loads(pickle.dumps(todist.__version__)) == todist.__version__
