"""The caller's thread → what of its state decides how a function computes, to be applied on a worker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import torch

from torchopt_dist._torch_private import outside_of_transforms, transforms_are_active

__all__ = ["CallerState", "Seeded", "ThreadSettings", "draw_seed"]


@dataclass(frozen=True)
class CallerState:
    """The part of the caller's state that decides how its function computes.

    Attributes:
        grad_enabled: whether a graph is recorded.
        autocast: for each device type with autocast switched on, the dtype it casts to.
        default_dtype: the dtype of new floating-point tensors. Torch keeps one for the whole process, so dtypes get
            mixed up on a worker that answers calls with several default dtypes at a time, or whose ``main`` changes it
            meanwhile: set the default dtype before ``main``.
    """

    grad_enabled: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    default_dtype: torch.dtype

    @classmethod
    def capture(cls) -> CallerState:
        """Read the state of this thread."""
        return cls(
            torch.is_grad_enabled(),
            tuple(
                (device, torch.get_autocast_dtype(device))
                for device in ("cpu", "cuda")
                if torch.is_autocast_enabled(device) and (device == "cpu" or torch.cuda.is_available())
            ),
            torch.get_default_dtype(),
        )

    def plain(self) -> tuple[bool, tuple[tuple[str, str], ...], str]:
        """Its fields, dtypes by their names."""
        autocast = tuple((device, _name(dtype)) for device, dtype in self.autocast)
        return self.grad_enabled, autocast, _name(self.default_dtype)

    @classmethod
    def of_plain(
        cls, grad_enabled: bool, autocast: tuple[tuple[str, str], ...], default_dtype: str
    ) -> CallerState:
        """The inverse of :meth:`plain`."""
        named = tuple((device, getattr(torch, name)) for device, name in autocast)
        return cls(grad_enabled, named, getattr(torch, default_dtype))

    def applied(self) -> AbstractContextManager[object]:
        """Context manager, to be entered at once: until it is left this thread computes under this state."""
        if not self.autocast and torch.get_default_dtype() == self.default_dtype:
            return torch.set_grad_enabled(self.grad_enabled)
        return self._applied()

    @contextmanager
    def _applied(self) -> Iterator[None]:
        before = torch.get_default_dtype()
        with torch.set_grad_enabled(self.grad_enabled), ExitStack() as stack:
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype))
            if before != self.default_dtype:
                torch.set_default_dtype(self.default_dtype)
                stack.callback(torch.set_default_dtype, before)
            yield


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class ThreadSettings:
    """Settings that torch keeps for each thread, captured in one thread and applied in others.

    Attributes:
        device: where tensors are made by default.
        gpu: the current GPU; ``None`` where no GPU is in use.
    """

    device: torch.device
    gpu: int | None

    @classmethod
    def capture(cls) -> ThreadSettings:
        """Read the settings of this thread."""
        gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        return cls(torch.get_default_device(), gpu)

    def apply(self) -> None:
        """Apply the settings to this thread."""
        if self.device != torch.get_default_device():
            torch.set_default_device(self.device)
        if self.gpu is not None:
            torch.cuda.set_device(self.gpu)


def draw_seed() -> int:
    """A number from the caller's default generator, from which the seeds of a call's tasks are derived."""
    if transforms_are_active():  # `vmap` refuses random numbers, and no result depends on this one's batch
        with outside_of_transforms():
            return _draw()
    return _draw()


def _draw() -> int:
    return int(torch.randint(2**62, (), device="cpu").item())


class Seeded:
    """Context manager that seeds torch's generators for one task, and restores their states afterwards.

    Args:
        seed: of the task.
    """

    # `torch.random.fork_rng` does the same, and takes half a millisecond to look for devices.
    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __enter__(self) -> None:
        generators = [torch.default_generator]
        if torch.cuda.is_initialized():
            generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
        self._before = [(generator, generator.get_state()) for generator in generators]
        for generator in generators:
            generator.manual_seed(self._seed)

    def __exit__(self, *_: object) -> None:
        for generator, state in self._before:
            generator.set_state(state)
