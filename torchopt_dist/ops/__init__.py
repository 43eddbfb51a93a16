"""Lists of tensors → lists of tensors: the formulas of steps, the kernels, and the choice between them."""

from torchopt_dist.ops import _fake_kernels
from torchopt_dist.ops._adam import AdamOp
from torchopt_dist.ops.library import accelerated_op_available, is_available, why_not

__all__ = ["AdamOp", "accelerated_op_available", "is_available", "why_not"]

_fake_kernels.register()
