"""A pytest plugin: calls of the kernels with tensors of the CPU → their kernels for CUDA, which an emulation runs."""

from __future__ import annotations

import ctypes
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch

torch.version.cuda = "13.0"  # the package then loads its CUDA library
runtime = ctypes.CDLL(str(Path(os.environ["CUDA_HOME"], "lib64/libtorch_cuda.so")), ctypes.RTLD_GLOBAL)
real: Any = torch.ops.todist
cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)


class Redispatched:
    """``torch.ops.todist``, on CUDA."""

    def __getattr__(self, op: str) -> Any:
        return partial(self.call, getattr(real, op).default)

    @staticmethod
    def call(op: Any, *args: Any) -> Any:
        return op.redispatch(cuda, *args)


torch.ops.todist = Redispatched()
