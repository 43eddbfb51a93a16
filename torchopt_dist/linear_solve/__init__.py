"""A product with a matrix, a right-hand side → the solution, with its residual and its number of iterations.

``solve_cg(...)`` and the other functions here make a :class:`Solver`: ``solver(matvec, b)`` is the solution, and
``solver.with_info(matvec, b)`` tells how it was found.
"""

from torchopt_dist.linear_solve.bicgstab import solve_bicgstab
from torchopt_dist.linear_solve.cg import solve_cg, solve_normal_cg
from torchopt_dist.linear_solve.gmres import solve_gmres
from torchopt_dist.linear_solve.inv import solve_inv
from torchopt_dist.linear_solve.neumann import solve_neumann
from torchopt_dist.linear_solve.solver import ConvergenceWarning, Solver, SolverInfo, jacobi

__all__ = [
    "ConvergenceWarning",
    "Solver",
    "SolverInfo",
    "jacobi",
    "solve_bicgstab",
    "solve_cg",
    "solve_gmres",
    "solve_inv",
    "solve_neumann",
    "solve_normal_cg",
]
