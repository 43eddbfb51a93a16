"""TorchOpt's names that torchopt_dist spells otherwise, or leaves to torch and optree → the objects they mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor
from torch.distributed import rpc
from torch.distributions import Distribution
from torch.futures import Future

import torchopt_dist as todist
from torchopt_dist import transform
from torchopt_dist.compat import _accelerated_op, _links, _orders
from torchopt_dist.compat._second_names import SECOND_NAMES
from torchopt_dist.core.types import OptionalTensor, TensorTree
from torchopt_dist.diff import implicit, zero_order

__all__ = ["CALLS", "FLAT", "NAMES"]


def tree_flatten_as_tuple(
    tree: TensorTree,
    is_leaf: Callable[[Any], bool] | None = None,
    *,
    none_is_leaf: bool = False,
    namespace: str = "",
) -> tuple[tuple[Any, ...], optree.PyTreeSpec]:
    """Take a tree apart as ``optree.tree_flatten``, the leaves as a tuple.

    Example:
        >>> leaves, spec = tree_flatten_as_tuple({"a": 1, "b": (2, None)})
        >>> leaves
        (1, 2)
    """
    leaves, spec = optree.tree_flatten(tree, is_leaf, none_is_leaf=none_is_leaf, namespace=namespace)
    return tuple(leaves), spec


OPTREE = (
    *(
        "all_leaves",
        "dict_insertion_ordered",
        "register_pytree_node",
        "register_pytree_node_class",
        "tree_all",
    ),
    *("tree_any", "tree_broadcast_common", "tree_broadcast_map", "tree_broadcast_prefix", "tree_flatten"),
    *(
        "tree_flatten_with_path",
        "tree_is_leaf",
        "tree_iter",
        "tree_leaves",
        "tree_map_",
        "tree_map_with_path",
    ),
    *(
        "tree_max",
        "tree_min",
        "tree_paths",
        "tree_reduce",
        "tree_replace_nones",
        "tree_structure",
        "tree_sum",
    ),
    *("tree_transpose", "tree_unflatten"),
)
"""optree's functions that TorchOpt's ``pytree`` offers under the same names."""

FLAT: dict[str, Any] = {
    **SECOND_NAMES,
    "AdaDelta": todist.Adadelta,
    "AdaGrad": todist.Adagrad,
    "AdaMax": todist.Adamax,
    "MetaAdaDelta": todist.MetaAdadelta,
    "MetaAdaGrad": todist.MetaAdagrad,
    "MetaAdaMax": todist.MetaAdamax,
    "MetaRMSProp": todist.MetaRMSprop,
    "RMSProp": todist.RMSprop,
    "MetaSGD": _orders.MetaSGD,
    "SGD": _orders.SGD,
    "UninitializedState": _orders.UninitializedState,
    "chain": _links.chain,
    "chain_flat": _links.chain_flat,
    "nan_to_num": _orders.nan_to_num,
    "sgd": _links.sgd,
    **{name: getattr(_accelerated_op, name) for name in _accelerated_op.__all__},
}
"""Names that any of TorchOpt's modules may offer."""

IMPLICIT: dict[str, Any] = {"ImplicitMetaGradientModule": todist.nn.ImplicitMetaGradientModule}
ZERO_ORDER: dict[str, Any] = {"ZeroOrderGradientModule": todist.nn.ZeroOrderGradientModule}
NAMES: dict[str, dict[str, Any]] = {
    "": FLAT,
    "alias.utils": _links.ALIAS_UTILS,
    **dict.fromkeys(("diff.implicit", "diff.implicit.nn", "diff.implicit.nn.module"), IMPLICIT),
    "diff.implicit.decorator": {"custom_root": implicit.custom_root},
    **dict.fromkeys(("diff.zero_order", "diff.zero_order.nn", "diff.zero_order.nn.module"), ZERO_ORDER),
    "diff.zero_order.decorator": {"zero_order": zero_order.zero_order},
    "distributed": {"rpc": rpc, **SECOND_NAMES},
    "linear_solve": {"solve_inv": _orders.solve_inv},
    "nn": {"reparameterize": todist.nn.reparametrize},
    "nn.stateless": {"reparameterize": todist.nn.reparametrize},
    "transform": {"scale_by_accelerated_adam": transform.scale_by_adam},
    "transform.utils": _links.TRANSFORM_UTILS,
    "pytree": {
        "tree_flatten_as_tuple": tree_flatten_as_tuple,
        **{name: getattr(optree, name) for name in OPTREE},
    },
    "typing": {
        "Distribution": Distribution,
        "Future": Future,
        "ListOfOptionalTensors": list[OptionalTensor],
        "ListOfTensors": list[Tensor],
        "OptionalTensorOrOptionalTensors": OptionalTensor | Sequence[OptionalTensor],
        "OptionalTensorTree": TensorTree,
        "SequenceOfOptionalTensors": Sequence[OptionalTensor],
        "SequenceOfTensors": Sequence[Tensor],
        "Size": torch.Size,
        "Tensor": Tensor,
        "TupleOfOptionalTensors": tuple[OptionalTensor, ...],
        "TupleOfTensors": tuple[Tensor, ...],
    },
}
"""Module of TorchOpt, without ``torchopt.`` → its names."""

CALLS: dict[str, Callable[..., Any]] = {"diff.zero_order": zero_order.zero_order}
"""Module of TorchOpt that can be called → what it then does."""
