"""What a script sets for its whole process, such as the default dtype and its logging → the same in a worker.

Under torchrun each worker runs the script, and so these statements. Here workers run one function of it.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import re
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from torchopt_dist.launching._pickling import pack, unpack

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """The settings of a process.

    Attributes:
        dtype: the default dtype.
        device: the default device; a GPU without a number is the current one.
        matmul: the precision of products of float32.
        deterministic: whether to use deterministic algorithms only, and whether others are warned of only.
        cudnn: whether cuDNN tries algorithms, and whether it uses deterministic ones only.
        anomaly: whether autograd detects anomalies, and checks for NaN.
        filters: of warnings: action, patterns of message and module, module and name of the category, line.
        levels: of loggers, by name; the root's is empty.
        handlers: of the root logger, those that write to standard error or output: which, the level, the packed
            formatter.
    """

    dtype: torch.dtype
    device: str
    matmul: str
    deterministic: tuple[bool, bool]
    cudnn: tuple[bool, bool]
    anomaly: tuple[bool, bool]
    filters: tuple[tuple[Any, str, str, str, str, int], ...]
    levels: dict[str, int]
    handlers: tuple[tuple[str, int, bytes], ...]

    @classmethod
    def capture(cls) -> Settings:
        """Read the settings of this process; the default device is the thread's."""
        root = logging.getLogger()
        loggers = {"": root, **root.manager.loggerDict}
        return cls(
            torch.get_default_dtype(),
            _default_device(),
            torch.get_float32_matmul_precision(),
            (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
            (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            tuple(map(_plain, warnings.filters)),
            {
                name: each.level
                for name, each in loggers.items()
                if isinstance(each, logging.Logger) and each.level
            },
            tuple(described for handler in root.handlers if (described := _describe(handler))),
        )

    def apply(self) -> None:
        """Let this process have the settings."""
        torch.set_default_dtype(self.dtype)
        if self.device != "cpu":
            torch.set_default_device(self.device)
        torch.set_float32_matmul_precision(self.matmul)
        if self.deterministic[0]:  # the function imports much
            torch.use_deterministic_algorithms(True, warn_only=self.deterministic[1])
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = self.cudnn
        torch.autograd.set_detect_anomaly(*self.anomaly)
        warnings.resetwarnings()
        for action, message, module, category_module, category_name, line in reversed(self.filters):
            with contextlib.suppress(KeyError, AttributeError):  # who is not imported here warns of nothing
                category = operator.attrgetter(category_name)(sys.modules[category_module])
                warnings.filterwarnings(action, message, category, module, line)
        for name, level in self.levels.items():
            logging.getLogger(name or None).setLevel(level)
        for stream, level, formatter in self.handlers:
            handler = logging.StreamHandler(getattr(sys, stream))
            handler.setLevel(level)
            with contextlib.suppress(Exception):  # its class is not here: the usual form
                handler.setFormatter(unpack(formatter))
            logging.getLogger().addHandler(handler)


def _default_device() -> str:
    device = torch.get_default_device()
    current = device.type == "cuda" and device.index == torch.cuda.current_device()
    return device.type if current else str(device)


def _plain(entry: tuple[Any, ...]) -> tuple[Any, str, str, str, str, int]:
    """A filter of warnings, so that it can be read where the category is unknown."""
    action, message, category, module, line = entry
    patterns = [part.pattern if isinstance(part, re.Pattern) else part or "" for part in (message, module)]
    return action, *patterns, category.__module__, category.__qualname__, line


def _describe(handler: logging.Handler) -> tuple[str, int, bytes] | None:
    """A handler that writes to standard error or output; ``None`` for others, which are this process's alone."""
    if isinstance(handler, logging.StreamHandler):
        for stream in ("stderr", "stdout"):
            if handler.stream in (getattr(sys, stream), getattr(sys, f"__{stream}__")):
                with contextlib.suppress(Exception):
                    return stream, handler.level, pack(handler.formatter)
                return stream, handler.level, b""
    return None
