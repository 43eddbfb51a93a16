"""Gradients → updates: the links that optimizers are chained from; updates → parameters moved."""

from torchopt_dist.transform.adadelta import scale_by_adadelta
from torchopt_dist.transform.adagrad import scale_by_rss
from torchopt_dist.transform.adam import scale_by_adam
from torchopt_dist.transform.adamax import scale_by_adamax
from torchopt_dist.transform.adan import scale_by_adan
from torchopt_dist.transform.add_decayed_weights import add_decayed_weights
from torchopt_dist.transform.add_noise import add_noise
from torchopt_dist.transform.apply_if_finite import apply_if_finite
from torchopt_dist.transform.apply_updates import apply_updates
from torchopt_dist.transform.average_params import average_params
from torchopt_dist.transform.base import (
    ChainedGradientTransformation,
    EmptyState,
    GradientTransformation,
    chain,
    identity,
    of_elements,
)
from torchopt_dist.transform.centralize import centralize
from torchopt_dist.transform.clip import adaptive_grad_clip, clip_grad_norm, clip_grad_value
from torchopt_dist.transform.ema import ema
from torchopt_dist.transform.hook import nan_to_num_hook, register_hook, zero_nan_hook
from torchopt_dist.transform.inject_hyperparams import inject_hyperparams
from torchopt_dist.transform.lamb import scale_by_trust_ratio
from torchopt_dist.transform.lion import scale_by_lion
from torchopt_dist.transform.lookahead import lookahead
from torchopt_dist.transform.masked import masked
from torchopt_dist.transform.multi_steps import multi_steps
from torchopt_dist.transform.muon import orthogonalize
from torchopt_dist.transform.nan_to_num import nan_to_num
from torchopt_dist.transform.partition import partition
from torchopt_dist.transform.radam import scale_by_radam
from torchopt_dist.transform.rmsprop import scale_by_rms, scale_by_stddev
from torchopt_dist.transform.scale import scale, scale_by_learning_rate, scale_by_schedule
from torchopt_dist.transform.schedule_free import schedule_free
from torchopt_dist.transform.set_to_zero import set_to_zero
from torchopt_dist.transform.trace import trace

__all__ = [
    "ChainedGradientTransformation",
    "EmptyState",
    "GradientTransformation",
    "adaptive_grad_clip",
    "add_decayed_weights",
    "add_noise",
    "apply_if_finite",
    "apply_updates",
    "average_params",
    "centralize",
    "chain",
    "clip_grad_norm",
    "clip_grad_value",
    "ema",
    "identity",
    "inject_hyperparams",
    "lookahead",
    "masked",
    "multi_steps",
    "nan_to_num",
    "nan_to_num_hook",
    "of_elements",
    "orthogonalize",
    "partition",
    "register_hook",
    "scale",
    "scale_by_adadelta",
    "scale_by_adam",
    "scale_by_adamax",
    "scale_by_adan",
    "scale_by_learning_rate",
    "scale_by_lion",
    "scale_by_radam",
    "scale_by_rms",
    "scale_by_rss",
    "scale_by_schedule",
    "scale_by_stddev",
    "scale_by_trust_ratio",
    "schedule_free",
    "set_to_zero",
    "trace",
    "zero_nan_hook",
]


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
