"""Operations of torch whose derivative is missing, wrong or long → the same by formulas; an operation a file.

Inside of transforms normalization is computed by its formula, since torch (2.13) differentiates ``layer_norm``, and
``batch_norm`` and ``instance_norm`` by their batch's statistics, in a way that takes mean and variance for constants
where the gradient of the weight is differentiated again from outside. So a step of ``torch.func.grad`` on the weight
has a wrong gradient with respect to all that comes before it. The same holds of ``weight_norm`` and its norms, and of
``embedding`` the rows of the padding are left out of one sample's gradient only.

In a sweep of forward over reverse mode, torch computes the tangents of attention and of layer normalization by
decompositions in Python, and the graph has nodes, with all that they save, for the computation of tangents, too, which
nobody goes back through. A custom function has one node, saves what its derivative needs, and has no graph of its
tangents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from torchopt_dist._formulas.activations import mish, silu
from torchopt_dist._formulas.attention import short_attention
from torchopt_dist._formulas.batch_norm import batch_norm, instance_norm, native_batch_norm
from torchopt_dist._formulas.dropout import dropout
from torchopt_dist._formulas.embedding import embedding
from torchopt_dist._formulas.group_norm import group_norm
from torchopt_dist._formulas.layer_norm import layer_norm, native_layer_norm, short_layer_norm
from torchopt_dist._formulas.losses import huber_loss, mse_loss
from torchopt_dist._formulas.weight_norm import scaled_to, weight_norm
from torchopt_dist._functional import replaced
from torchopt_dist._torch_private import places_of_weight_norm

__all__ = ["ForwardModeFormulas", "formulas_in_transforms", "short_formulas"]


@contextmanager
def formulas_in_transforms() -> Iterator[None]:
    """A context in which this thread's torch normalizes and looks up by formulas inside of transforms.

    ``torch.nn.functional`` and modules call the same functions of ``torch``, which are replaced.
    """
    with ExitStack() as stack:
        stack.enter_context(replaced(torch, _IN_TRANSFORMS))
        for module, name in places_of_weight_norm():
            stack.enter_context(replaced(module, {name: weight_norm}))
        yield


def short_formulas() -> AbstractContextManager[None]:
    """A context in which attention and layer normalization are one node of a graph each, in this thread."""
    return replaced(F, {"scaled_dot_product_attention": short_attention, "layer_norm": short_layer_norm})


class ForwardModeFormulas(TorchFunctionMode):
    """A context in which functions compute by formulas whose gradient, unlike theirs, has a forward mode."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _IN_FORWARD_MODE.get(func, func)(*args, **(kwargs or {}))


_IN_TRANSFORMS: dict[str, Callable[..., Any]] = {
    "layer_norm": layer_norm,
    "native_layer_norm": native_layer_norm,
    "batch_norm": batch_norm,
    "native_batch_norm": native_batch_norm,
    "instance_norm": instance_norm,
    "embedding": embedding,
}
_IN_FORWARD_MODE: dict[Any, Callable[..., Any]] = {
    F.mse_loss: mse_loss,
    F.huber_loss: huber_loss,
    F.silu: silu,
    F.mish: mish,
    F.group_norm: group_norm,
    F.dropout: dropout,
    **{getattr(module, name): scaled_to for module, name in places_of_weight_norm()},
}
