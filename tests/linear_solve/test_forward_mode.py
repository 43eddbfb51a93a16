"""Forward-mode derivatives of solves and implicit solutions → an error that names them and what to use instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from tests.rows import each_row
from torchopt_dist import linalg, linear_solve
from torchopt_dist.core import vjp
from torchopt_dist.diff.implicit import custom_fixed_point, custom_root

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


@custom_root(lambda x, t: 4 * x - t, argnums=1)
def root(x: Tensor, t: Tensor) -> Tensor:
    return t / 4


@custom_fixed_point(lambda x, t: x / 2 + t, argnums=1)
def fixed_point(x: Tensor, t: Tensor) -> Tensor:
    return 2 * t


SOLUTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "root": lambda t: root(torch.ones_like(t), t),
    "fixed point": lambda t: fixed_point(torch.ones_like(t), t),
    "matrix of linalg.cg": lambda t: linalg.cg(lambda v: v * t, torch.ones(2)),
    "matrix": lambda t: linear_solve.solve_gmres()(lambda v: v * t, torch.ones(2)),
    "right-hand side": lambda t: linear_solve.solve_cg()(lambda v: v * 2, t),
}


def by_dual_numbers(function: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(t, torch.ones_like(t)))


WAYS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], object]] = {
    "jvp": lambda function, t: torch.func.jvp(function, (t,), (torch.ones_like(t),)),
    "jacfwd": lambda function, t: torch.func.jacfwd(function)(t),
    "forward over reverse": lambda function, t: torch.func.hessian(lambda t: function(t).sum())(t),
    "forward_ad": by_dual_numbers,
}


@each_row("way", WAYS)
@each_row("solution", SOLUTIONS)
def test_forward_mode_is_refused(solution: str, way: str) -> None:
    with pytest.raises(NotImplementedError, match=r"no forward-mode derivative .*: use torch\.func\.vjp"):
        WAYS[way](SOLUTIONS[solution], torch.tensor([2.0, 3.0]))


@each_row("solution", SOLUTIONS)
def test_reverse_mode_gives_the_derivative(solution: str) -> None:
    t = torch.tensor([2.0, 3.0])
    truth = {
        "root": torch.full((2,), 0.25),
        "fixed point": torch.full((2,), 2.0),
        "right-hand side": torch.full((2,), 0.5),
    }.get(solution, -(t**-2))
    torch.testing.assert_close(torch.func.jacrev(SOLUTIONS[solution])(t).diag(), truth, rtol=1e-4, atol=1e-4)


def test_solves_work_where_torch_does_not_say_whether_forward_mode_is_active(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vjp, "forward_mode_is_active", lambda: True)  # its answer without torch's name
    solution = linear_solve.solve_cg()(lambda v: v * 2, torch.ones(2))
    torch.testing.assert_close(solution, torch.full((2,), 0.5))
