"""An inner loop → its outcome, with its gradient: one file for each way to take it.

How to add one is said in :mod:`torchopt_dist.diff.adjoints.adjoint`.
"""

from torchopt_dist.diff.adjoints.adjoint import Adjoint
from torchopt_dist.diff.adjoints.evolution_strategies import (
    EvolutionStrategies,
    PersistentEvolutionStrategies,
)
from torchopt_dist.diff.adjoints.finite_difference import FiniteDifference
from torchopt_dist.diff.adjoints.first_order import FirstOrder
from torchopt_dist.diff.adjoints.implicit import Implicit
from torchopt_dist.diff.adjoints.recorded import Recorded
from torchopt_dist.diff.adjoints.replayed import Replayed
from torchopt_dist.diff.adjoints.reptile import Reptile
from torchopt_dist.diff.adjoints.sama import SAMA
from torchopt_dist.diff.adjoints.truncated import Truncated

__all__ = [
    "SAMA",
    "Adjoint",
    "EvolutionStrategies",
    "FiniteDifference",
    "FirstOrder",
    "Implicit",
    "PersistentEvolutionStrategies",
    "Recorded",
    "Replayed",
    "Reptile",
    "Truncated",
]


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
