"""The messages between workers: a pickle, the tensors and structures that it mentions, and what goes with sent code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchopt_dist.distributed.messages.references import ConnectedRRef, Handle, StayingModule

__all__ = ["MUCH_CODE", "GlobalsOfCode", "Late", "Message", "description_of_much"]


MUCH_CODE = 1 << 20
"""Bytes from which on the global variables that go with the code of a function are warned of."""


@dataclass
class GlobalsOfCode:
    """What a pickler meets in the global variables of functions whose code it sends.

    Attributes:
        inside: whether it is at these variables now.
        numbers: of the tensors that have been met nowhere else.
        pickled: how many bytes of the pickle the variables take.
    """

    inside: bool = False
    numbers: set[int] = field(default_factory=set)
    variables: dict[str, Any] = field(default_factory=dict)
    pickled: int = 0

    def met(self, number: int, *, is_new: bool) -> None:
        """A tensor is met, in global variables or elsewhere."""
        if not self.inside:
            self.numbers.discard(number)
        elif is_new:
            self.numbers.add(number)

    def nbytes(self, tensors: Sequence[Tensor]) -> int:
        """How many bytes they take, of the pickle and of tensors."""
        return self.pickled + sum(tensors[number].nbytes for number in self.numbers)


def description_of_much(
    name: str, globals_of_code: GlobalsOfCode, nbytes: int, size: Callable[[Any], int]
) -> str:
    """The warning that the code of a function takes much with it; ``size`` tells how many bytes an object takes."""
    sizes = {
        variable: size(value)
        for variable, value in globals_of_code.variables.items()
        if not isinstance(value, (FunctionType, ModuleType))
    }
    largest = sorted(sizes, key=lambda variable: -sizes[variable])[:3]
    listed = ", ".join(
        f"`{variable}` ({sizes[variable] / 1e6:.1f} MB)"
        for variable in largest
        if 10 * sizes[variable] >= sizes[largest[0]]
    )
    return (
        f"`{name}` is sent as code, since the workers do not find it by name, and with it {nbytes / 1e6:.1f} MB of "
        f"global variables{listed and ': '}{listed}. This is sent in each call: make it an argument, which "
        "`todist.put` sends once, or keep it in a module that the workers import"
    )


class Late(NamedTuple):
    """Which tensors of a message are sent empty and come later, in chunks, within so many seconds; 0: no limit."""

    numbers: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    chunks: int
    seconds: float


@dataclass
class Message:
    """A pickle, and beside it the tensors and the structures of modules that it mentions.

    Attributes:
        skeleton: the pickled object, with a number in each tensor's place.
        tensors: they are detached when the message is sent.
        structures: the pickles of modules without their tensors, which the skeleton mentions by number.
        connected: in a reply, the numbers of the tensors that are outputs of the graph the worker keeps.
        device: in a call, where the receiver puts the tensors; see ``ExecutionOptions``.
        used_up: in a reply, a graph that its sender drops only after sending, since freeing it takes time.
        buffers: at the sender, the numbers of the tensors, besides parameters, that a module may hold and change, and
            of those on the memory of numpy arrays.
        references: the ``torch.distributed.rpc.RRef``s that the skeleton mentions.
        handles: at the sender, those that the skeleton mentions; their values are there while the message is.
        key: of a call that is sent again, or handed on; it counts instead of the one in the skeleton.
        arrived: of a call that has been rebuilt, what its tasks get for RRefs that are connected to it.
        told: of a reply that is an exception, its text, its traceback and its worker, for who cannot read the rest.
        code: at the sender, the global variables that functions bring that are sent as code.
        cut: of a call, the numbers of tensors that only such variables hold, and that require grad there.
        function: at the sender, the name of the function that is called, for who says that the reply is late.
        apart: of a call that has been rebuilt, these tensors. They are the receiver's own: they require grad, but no
            gradient goes back to the sender.
    """

    skeleton: bytes
    tensors: list[torch.Tensor]
    requires_grad: list[bool]
    is_parameter: list[bool]
    structures: tuple[bytes, ...] = ()
    connected: tuple[int, ...] = ()
    device: str | None = None
    used_up: Any = None
    buffers: frozenset[int] = frozenset()
    references: list[Any] = field(default_factory=list)
    handles: list[Handle | StayingModule] = field(default_factory=list)
    key: tuple[int, int] | None = None
    late: Late | None = None
    arrived: Sequence[ConnectedRRef] = ()
    told: tuple[str, str, str] | None = None
    code: GlobalsOfCode | None = None
    cut: tuple[int, ...] = ()
    apart: Sequence[torch.Tensor] = ()
    function: str = ""

    def detached(self) -> Message:
        """The message as it travels; itself, if it has no tensors."""
        if not self.tensors:
            return self
        return self.with_tensors([tensor.detach() for tensor in self.tensors])

    def received(self, device: torch.device | None = None) -> Message:
        """The message as it is used: its tensors are leaves, on ``device``, that require grad where the sender's do."""
        if not self.tensors:
            return self
        return self.with_tensors(
            [
                nn.Parameter(tensor.to(device), requires_grad)
                if is_parameter
                else tensor.to(device).requires_grad_(requires_grad)
                for tensor, requires_grad, is_parameter in zip(
                    self.tensors, self.requires_grad, self.is_parameter, strict=True
                )
            ]
        )

    def with_tensors(self, tensors: list[torch.Tensor], **changes: Any) -> Message:
        """The same with other tensors, and perhaps with other values of other fields."""
        other = object.__new__(
            Message
        )  # `copy.copy` takes ten times as long, and each call has four of these
        vars(other).update(vars(self), tensors=tensors, **changes)
        return other

    def __reduce__(self) -> tuple[Any, ...]:
        """Inside another message: its content, whose tensors the other message has, too."""
        content = self.structures, self.device, self.references, self.late, self.told, self.cut
        return _inner, (self.skeleton, self.tensors, *content)

    def late_tensors(self) -> list[torch.Tensor]:
        """The tensors that come later."""
        return [] if self.late is None else [self.tensors[number] for number in self.late.numbers]

    def inputs(self) -> list[torch.Tensor]:
        """The tensors whose gradients are wanted."""
        return [tensor for tensor in self.tensors if tensor.requires_grad]

    def nbytes(self) -> int:
        """How many bytes of the message the network carries: pickles and tensors."""
        pickles = len(self.skeleton) + sum(map(len, self.structures))
        tensors = sum(tensor.nbytes for tensor in self.tensors)
        return pickles + tensors


def _inner(skeleton: bytes, tensors: list[torch.Tensor], *content: Any) -> Message:
    """In a pickle: a message that is forwarded."""
    structures, device, references, late, told, cut = content
    return Message(
        skeleton,
        tensors,
        [tensor.requires_grad for tensor in tensors],
        [isinstance(tensor, nn.Parameter) for tensor in tensors],
        structures,
        device=device,
        references=references,
        late=late,
        told=told,
        cut=cut,
    )
