"""Operations of torch whose derivative is missing, wrong or long → the same by formulas; a kind of them a file.

Inside of transforms normalization is computed by its formula, since torch (2.13) differentiates ``layer_norm``, and
``batch_norm`` and ``instance_norm`` by their batch's statistics, in a way that takes mean and variance for constants
where the gradient of the weight is differentiated again from outside. So a step of ``torch.func.grad`` on the weight
has a wrong gradient with respect to all that comes before it. The same holds of ``weight_norm`` and its norms, and of
``embedding`` the rows of the padding are left out of one sample's gradient only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from torchopt_dist.core.functional import replaced
from torchopt_dist.formulas.embedding import embedding
from torchopt_dist.formulas.normalization import (
    batch_norm,
    instance_norm,
    layer_norm,
    native_batch_norm,
    native_layer_norm,
)
from torchopt_dist.formulas.weight_norm import weight_norm
from torchopt_dist.torch_private import places_of_weight_norm, transforms_are_active

__all__ = ["formulas_in_transforms"]


@contextmanager
def formulas_in_transforms() -> Iterator[None]:
    """A context in which this thread's torch normalizes and looks up by formulas inside of transforms.

    ``torch.nn.functional`` and modules call the same functions of ``torch``, which are replaced.
    """
    with ExitStack() as stack:
        stack.enter_context(replaced(torch, _IN_TRANSFORMS, transforms_are_active))
        for module, name in places_of_weight_norm():
            stack.enter_context(replaced(module, {name: weight_norm}, transforms_are_active))
        yield


_IN_TRANSFORMS: dict[str, Callable[..., Any]] = {
    "layer_norm": layer_norm,
    "native_layer_norm": native_layer_norm,
    "batch_norm": batch_norm,
    "native_batch_norm": native_batch_norm,
    "instance_norm": instance_norm,
    "embedding": embedding,
}
