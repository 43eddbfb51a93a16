"""A name that TorchOpt documents → what it means, where ``torchopt_dist`` has it elsewhere or under another name.

``torchopt_dist.x`` finds it here, so that programs that import ``torchopt_dist`` in TorchOpt's place run as they are;
such a name is not in ``torchopt_dist.__all__``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

from torchopt_dist import distributed, nn, ops, transform

__all__ = ["SECOND_NAMES"]

P = ParamSpec("P")
T = TypeVar("T")
_NOT_GIVEN: Any = object()


def module_detach_(target: T) -> T:
    """Detach a target from its history, as :func:`torchopt_dist.stop_gradient`, and return it.

    Args:
        target: what ``stop_gradient`` takes.
    """
    nn.stop_gradient(target)
    return target


@overload
def rank_all(func: Callable[P, T]) -> Callable[P, T]: ...


@overload
def rank_all() -> Callable[[Callable[P, T]], Callable[P, T]]: ...


def rank_all(func: Any = _NOT_GIVEN) -> Any:
    """Run the decorated function on every rank; the function is returned as it is.

    Args:
        func: the function; without it, as in ``@rank_all()``, a decorator is returned.
    """
    return rank_all if func is _NOT_GIVEN else func


SECOND_NAMES: dict[str, Any] = {
    "exclusive_batch_partitioner": distributed.dim_partitioner(dim=0, exclusive=True, keepdim=True),
    "get_world_rank": distributed.get_rank,
    "module_detach_": module_detach_,
    "parallelize_sync": distributed.parallelize,
    "rank_all": rank_all,
    **{
        name: getattr(place, name)
        for place, names in {
            distributed: ("TensorDimensionPartitioner", "default_worker_name_format", "is_available"),
            nn: ("ModuleState",),
            ops: ("accelerated_op_available",),
            transform: (
                *("ChainedGradientTransformation", "EmptyState", "GradientTransformation", "identity"),
                *("clip_grad_norm", "nan_to_num", "nan_to_num_hook", "register_hook", "zero_nan_hook"),
            ),
        }.items()
        for name in names
    },
}
