"""Gradients → updates: the links that optimizers are chained from."""

from torchopt_dist.transform.add_decayed_weights import add_decayed_weights
from torchopt_dist.transform.base import (
    ChainedGradientTransformation,
    EmptyState,
    GradientTransformation,
    chain,
    identity,
)
from torchopt_dist.transform.scale import scale, scale_by_learning_rate, scale_by_schedule
from torchopt_dist.transform.trace import trace

__all__ = [
    "ChainedGradientTransformation",
    "EmptyState",
    "GradientTransformation",
    "add_decayed_weights",
    "chain",
    "identity",
    "scale",
    "scale_by_learning_rate",
    "scale_by_schedule",
    "trace",
]
