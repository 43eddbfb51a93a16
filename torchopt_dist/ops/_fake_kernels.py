"""Shapes → shapes: each kernel without its computation, for ``torch.compile`` and ``opcheck``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchopt_dist.ops import library

__all__ = ["register"]


def _nothing(*args: Any) -> None:
    """The results of an op in place: none; the arguments keep their shapes."""
    _check_devices([x for arg in args if isinstance(arg, list) for x in arg])


def _moved(grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor], *_: Any) -> list[Tensor]:
    return _like(exp_avgs, exp_avgs, exp_avg_sqs)


def _adam_backward(*args: Any) -> list[Tensor]:
    grads, exp_avgs, exp_avg_sqs, params = args[3:7]  # the parameters only with weight decay
    return _like(grads, exp_avgs, exp_avg_sqs, params)


def _rmsprop(
    grads: list[Tensor],
    square_avgs: list[Tensor],
    grad_avgs: list[Tensor],
    momentum_buffers: list[Tensor],
    *_: Any,
) -> list[Tensor]:
    return _like(square_avgs, square_avgs, grad_avgs, momentum_buffers)


def _rmsprop_backward(*args: Any) -> list[Tensor]:
    grads, square_avgs, grad_avgs = args[4:7]
    momentum = args[10]
    return _like(grads, square_avgs, grad_avgs, square_avgs if momentum != 0 else [])


def _sgd(grads: list[Tensor], momentum_buffers: list[Tensor], params: list[Tensor], *_: Any) -> list[Tensor]:
    _check_devices([*grads, *momentum_buffers, *params])
    return _like(params or grads, momentum_buffers)


def _sgd_backward(
    moved_grads: list[Tensor], momentum_buffer_grads: list[Tensor], *numbers: Any
) -> list[Tensor]:
    _check_devices([*moved_grads, *momentum_buffer_grads])
    *_, momentum, _, weight_decay, _ = numbers
    return _like(*[moved_grads] * (1 + (momentum != 0) + (weight_decay != 0)))


def _like(*columns: list[Tensor]) -> list[Tensor]:
    xs = [x for column in columns for x in column]
    _check_devices(xs)
    return [torch.empty_like(x) for x in xs]


def _check_devices(xs: list[Tensor]) -> None:
    """Check that all tensors are on one device: torch calls the fake kernel if any of the tensors is on meta."""
    devices = sorted({str(x.device) for x in xs})
    if len(devices) > 1:
        raise RuntimeError(f"the kernel takes tensors of one device; got {', '.join(devices)}")


FAKES: dict[str, Callable[..., Any]] = {
    "adam": _moved,
    "adam_backward": _adam_backward,
    "rmsprop": _rmsprop,
    "rmsprop_": _nothing,
    "rmsprop_backward": _rmsprop_backward,
    "sgd": _sgd,
    "sgd_backward": _sgd_backward,
}


def register() -> None:
    """Register the fake kernel of each op that is available."""
    for op, fake in FAKES.items():
        if library.is_available(op):
            torch.library.register_fake(f"todist::{op}", fake)
