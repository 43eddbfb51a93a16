"""A function, a start → a fixed point or a root, with its residual and its number of iterations."""

from torchopt_dist.nonlinear_solve.anderson import anderson
from torchopt_dist.nonlinear_solve.broyden import broyden
from torchopt_dist.nonlinear_solve.fixed_point_iteration import fixed_point_iteration
from torchopt_dist.nonlinear_solve.newton import newton
from torchopt_dist.nonlinear_solve.solver import NonlinearSolver, NonlinearSolverInfo

__all__ = ["NonlinearSolver", "NonlinearSolverInfo", "anderson", "broyden", "fixed_point_iteration", "newton"]
