"""The partitions of one worker → one message, and back: a skeleton of bytes beside the tensors it mentions.

The whole payload is pickled at once, so an object that several tasks share travels once. Tensors are taken out of it,
wherever they are (in a module, a closure, a dictionary), so that a graph can be drawn through them and their memory is
not copied into the pickle.
"""

from __future__ import annotations

import functools
import importlib
import io
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any

import cloudpickle
import torch
from torch import nn

from torchopt_dist.distributed.partition import Partition
from torchopt_dist.errors import SerializationError
from torchopt_dist.typing import Args, KwArgs

__all__ = ["CallerState", "Message", "Payload", "group_by_worker", "pack", "unpack"]


@dataclass(frozen=True)
class CallerState:
    """What of the caller's state decides how its function computes.

    Attributes:
        grad_enabled: whether a graph is recorded.
        autocast: for each device type with autocast switched on, the dtype it casts to.
        default_dtype: the dtype of new floating-point tensors.
    """

    grad_enabled: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    default_dtype: torch.dtype

    @classmethod
    def capture(cls) -> CallerState:
        """Read the state of this thread."""
        devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        return cls(
            torch.is_grad_enabled(),
            tuple(
                (device, torch.get_autocast_dtype(device))
                for device in devices
                if torch.is_autocast_enabled(device)
            ),
            torch.get_default_dtype(),
        )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Compute under this state until the context is left."""
        before = torch.get_default_dtype()
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad_enabled))
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype))
            if before != self.default_dtype:
                torch.set_default_dtype(self.default_dtype)
                stack.callback(torch.set_default_dtype, before)
            yield


@dataclass(frozen=True)
class Payload:
    """What one worker has to do for one call.

    Attributes:
        function: the function to call.
        tasks: its arguments, ``(args, kwargs)`` for each call.
        state: the caller's state to compute under.
    """

    function: Callable[..., Any]
    tasks: tuple[tuple[Args, KwArgs], ...]
    state: CallerState = field(default_factory=CallerState.capture)


def group_by_worker(
    function: Callable[..., Any], partitions: Sequence[Partition]
) -> dict[int, tuple[Payload, list[int]]]:
    """Gather the partitions of each worker.

    Returns:
        For each worker's rank its payload, and the indices of its tasks among ``partitions``.
    """
    indices: dict[int, list[int]] = {}
    for index, part in enumerate(partitions):
        indices.setdefault(int(part.worker), []).append(index)
    state = CallerState.capture()
    return {
        worker: (
            Payload(function, tuple((partitions[i].args, partitions[i].kwargs) for i in mine), state),
            mine,
        )
        for worker, mine in indices.items()
    }


@dataclass
class Message:
    """What travels: a pickle, and beside it the tensors that it mentions by number.

    Attributes:
        skeleton: the pickled object, with a number in each tensor's place.
        tensors: the tensors; detached while they travel.
        requires_grad: for each tensor, whether it requires grad.
        is_parameter: for each tensor, whether it is an ``nn.Parameter``.
        connected: in a reply, the numbers of the tensors that are outputs of the graph the worker keeps.
    """

    skeleton: bytes
    tensors: list[torch.Tensor]
    requires_grad: list[bool]
    is_parameter: list[bool]
    connected: tuple[int, ...] = ()

    def detached(self) -> Message:
        """The message as it travels."""
        return replace(self, tensors=[tensor.detach() for tensor in self.tensors])

    def received(self) -> Message:
        """The message as it arrives: its tensors are leaves that require grad where the sender's do."""
        return replace(
            self,
            tensors=[
                nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)
                for tensor, requires_grad, is_parameter in zip(
                    self.tensors, self.requires_grad, self.is_parameter, strict=True
                )
            ],
        )

    def inputs(self) -> list[torch.Tensor]:
        """The tensors that gradients are wanted for."""
        return [tensor for tensor in self.tensors if tensor.requires_grad]


def pack(value: Any, *, main_by_name: bool) -> Message:
    """Pickle ``value``, with its tensors beside.

    Args:
        value: any object.
        main_by_name: whether functions and classes of ``__main__`` can be sent by name, since the receiver runs the
            same program; else their code is sent. What is importable is always sent by name.

    Returns:
        The message; its tensors are part of the graph that they are part of in ``value``.

    Raises:
        SerializationError: some part of it cannot be pickled.
    """
    buffer = io.BytesIO()
    packer = _Packer(buffer, main_by_name)
    try:
        packer.dump(value)
    except SerializationError:
        raise
    except Exception as error:  # pickling runs the objects' own code, which raises what it likes
        raise SerializationError(f"{type(error).__name__}: {error}") from error
    return Message(
        buffer.getvalue(),
        [_sendable(tensor) for tensor in packer.tensors],
        [tensor.requires_grad for tensor in packer.tensors],
        [isinstance(tensor, nn.Parameter) for tensor in packer.tensors],
    )


def unpack(message: Message) -> Any:
    """Rebuild what :func:`pack` packed, with the message's tensors as they are.

    Raises:
        SerializationError: a module, function or class that it mentions is not there.
    """
    try:
        return _Unpacker(message).load()
    except Exception as error:  # unpickling runs the objects' own code, which raises what it likes
        raise SerializationError(f"{type(error).__name__}: {error}") from error


class _Packer(cloudpickle.Pickler):
    """Pickler that takes tensors out, and names functions rather than copying their code where it can."""

    def __init__(self, buffer: io.BytesIO, main_by_name: bool) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}
        self._main_by_name = main_by_name

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, torch.Tensor):
            return None
        number = self._numbers.setdefault(id(obj), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(obj)
        return number

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (FunctionType, type)):
            name = _name_of(obj, self._main_by_name)
            if name is not None:
                return _find, name
        return super().reducer_override(obj)


class _Unpacker(pickle.Unpickler):
    def __init__(self, message: Message) -> None:
        super().__init__(io.BytesIO(message.skeleton))
        self._tensors = message.tensors

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self._tensors[pid]


def _sendable(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the same values and graph whose storage holds nothing else."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise SerializationError("a tensor inside a torch.func transform cannot be sent")
    if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
        kind = "meta" if tensor.is_meta else "quantized" if tensor.is_quantized else str(tensor.layout)
        raise SerializationError(
            f"a {kind} tensor of shape {tuple(tensor.shape)} cannot be sent: only dense tensors can"
        )
    if tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size():
        return tensor.clone()
    return tensor


def _name_of(obj: Any, main_by_name: bool) -> tuple[str, str, int] | None:
    """Where a receiver finds ``obj``: module, qualified name, how often to unwrap; ``None`` leaves it to cloudpickle.

    A decorated function is not what its name says; it is found behind ``__wrapped__``.
    """
    module, qualname = getattr(obj, "__module__", None), getattr(obj, "__qualname__", "")
    if not module or "<locals>" in qualname or (module == "__main__" and not main_by_name):
        return None
    found = functools.reduce(
        lambda owner, name: getattr(owner, name, None), qualname.split("."), sys.modules.get(module)
    )
    depth = 0
    while found is not None and found is not obj:
        found, depth = getattr(found, "__wrapped__", None), depth + 1
    if found is None or (depth == 0 and module != "__main__"):
        return None
    return module, qualname, depth


def _find(module: str, qualname: str, depth: int) -> Any:
    found: Any = importlib.import_module(module)
    for name in qualname.split("."):
        found = getattr(found, name)
    for _ in range(depth):
        found = found.__wrapped__
    return found
