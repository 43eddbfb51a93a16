"""A name that a module or an object does not have → an error that says which one is meant, here or from torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import ModuleType
from typing import Any, NoReturn, TypeVar

from torchopt_dist.arguments.options import close_to

__all__ = ["missing_methods", "missing_name", "tell_missing_names"]

KindT = TypeVar("KindT", bound=type)

TORCH = {
    "CosineAnnealingLR": "schedule.cosine_decay",
    "ConstantLR": "schedule.piecewise_constant_schedule",
    "DDP": "DataParallel",
    "DistributedDataParallel": "DataParallel",
    "ExponentialLR": "schedule.exponential_decay",
    "LinearLR": "schedule.linear_schedule",
    "MultiStepLR": "schedule.piecewise_constant_schedule",
    "OneCycleLR": "schedule.one_cycle",
    "PolynomialLR": "schedule.polynomial_schedule",
    "SequentialLR": "schedule.join_schedules",
    "StepLR": "schedule.piecewise_constant_schedule",
    "clip_grad_norm_": "transform.clip_grad_norm",
    "clip_grad_value_": "transform.clip_grad_value",
    "init_process_group": "auto_init_rpc",
    "init_rpc": "auto_init_rpc",
    "load": "Checkpointer",
    "lr_scheduler": "schedule",
    "rpc_async": "remote_async_call",
    "rpc_sync": "remote_call",
    "save": "Checkpointer",
    "spawn": "launch",
    "vmap": "parallelize",
}
"""Names of torch's → what does the same here; both without ``torch`` and ``torchopt_dist``."""


def missing_name(
    place: str, name: str, known: Collection[str], elsewhere: Mapping[str, str]
) -> AttributeError:
    """The error for a name that a module does not have.

    Args:
        place: the module's name.
        name: the name.
        known: the names that it has.
        elsewhere: names of other modules → these names with their places.
    """
    initials = [one for one in known if name == "".join(filter(str.isupper, one))]  # PES
    parts = [one for one in known if name.lower() in one.lower().split("_")]
    hint = close_to(name, known)
    if name in TORCH:
        hint = f": torch's `{name}` is `todist.{TORCH[name]}` here"
    elif name in elsewhere:
        hint = f"; it is `{elsewhere[name]}`"
    elif meant := initials or parts:
        hint = f": did you mean {' or '.join(f'`{one}`' for one in meant)}?"
    return AttributeError(f"module {place!r} has no attribute {name!r}{hint}")


def tell_missing_names(*modules: ModuleType) -> dict[str, str]:
    """Give modules that have none a ``__getattr__``, which says where a name is which they do not have.

    Returns:
        The names of all of them → these names with their places; of two places, the first.
    """
    places = {name: f"{module.__name__}.{name}" for module in reversed(modules) for name in module.__all__}
    for module in modules:

        def told(name: str, module: ModuleType = module) -> NoReturn:
            if name.startswith("_"):
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            raise missing_name(module.__name__, name, module.__all__, places)

        vars(module).setdefault("__getattr__", told)
    return places


def missing_methods(**meant: str) -> Any:
    """Make a class say, for an attribute that it does not have, which one is meant.

    Args:
        meant: names that users of torch and of other libraries write → what is written here.
    """

    def decorator(kind: KindT) -> KindT:
        def told(self: Any, name: str) -> NoReturn:
            own = [] if name.startswith("_") else [one for one in dir(kind) if one[0] != "_"]
            hint = f": write `{meant[name]}`" if name in meant else close_to(name, own)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

        vars_of: Any = kind
        vars_of.__getattr__ = told
        return kind

    return decorator
