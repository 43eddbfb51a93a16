"""A training, losses of the trained model → which examples made them so, and a check by trainings without some."""

from torchopt_dist.attribution.result import Attribution
from torchopt_dist.attribution.scores import attribute
from torchopt_dist.attribution.training import Training
from torchopt_dist.attribution.validation import Validation, counterfactual, metasmoothness, validate

__all__ = [
    "Attribution",
    "Training",
    "Validation",
    "attribute",
    "counterfactual",
    "metasmoothness",
    "validate",
]


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
