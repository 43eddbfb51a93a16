"""Matrices → solutions and inverses by iterations, with the gradients of the solutions."""

from torchopt_dist.linalg.cg import cg
from torchopt_dist.linalg.neumann import ns, ns_inv

__all__ = ["cg", "ns", "ns_inv"]
