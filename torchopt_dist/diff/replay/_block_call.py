"""A call of a block → the same call again: with the arguments, random numbers, parameters and modes that it had."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchopt_dist import pytree
from torchopt_dist._torch_private import tensor_version
from torchopt_dist.diff.adjoints._randomness import generators
from torchopt_dist.diff.replay._duals import Pair, leaf_of_pair, pair_of
from torchopt_dist.nn import _tensor_dicts
from torchopt_dist.typing import OptionalTensor, TensorContainer

__all__ = ["BlockCall", "inputs_of"]


class _Input(int):
    """A placeholder for an input of the block."""


class _Own(int):
    """A placeholder for a parameter whose gradient is wanted."""


Held = list[tuple[TensorContainer, str, Any]]


def inputs_of(block: nn.Module, arguments: Any, own: Collection[int]) -> list[Tensor]:
    """What a call of a block depends on and requires grad, each once: arguments, parameters that the loss has put in.

    Args:
        block: the module.
        arguments: positional and keyword arguments.
        own: the ``id`` of each parameter that is not counted.
    """
    held = [x for _, _, x in _held(_tensor_dicts.parameter_containers(block))]
    tensors = [x for x in [*pytree.flatten(arguments)[0], *held] if isinstance(x, Tensor) and x.requires_grad]
    return list({id(x): x for x in tensors if id(x) not in own}.values())


class BlockCall:
    """One call of a block.

    Args:
        name: the name of the block, for errors.
        block: the module.
        forward: the function that computes it.
        arguments: its positional arguments, its keyword arguments.
        own: the ``id`` of a parameter that gradients are wanted for → its place among these.
        with_tangents: whether tensors may be duals.
    """

    def __init__(
        self,
        name: str,
        block: nn.Module,
        forward: Callable[..., Any],
        arguments: Any,
        own: Mapping[int, int],
        *,
        with_tangents: bool,
    ) -> None:
        self.name, self._forward, self._with_tangents = name, forward, with_tangents
        inputs = inputs_of(block, arguments, own)
        self.inputs = [pair_of(x) for x in inputs]
        """What :func:`inputs_of` finds, without history."""
        places: dict[int, Any] = {id(x): _Input(place) for place, x in enumerate(inputs)}
        places |= {name: _Own(place) for name, place in own.items()}

        def marked(x: Any) -> Any:
            return places.get(id(x), x) if isinstance(x, Tensor) else x

        given, self._spec = pytree.flatten(arguments)
        self._given = list(map(marked, given))
        self._held_parameters = [
            (container, key, marked(x))
            for container, key, x in _held(_tensor_dicts.parameter_containers(block))
        ]
        self._held_buffers = _held(_tensor_dicts.buffer_containers(block))
        self._before = [(generator, generator.get_state()) for generator in generators()]
        self._after = self._before
        self._autocast = _autocast_now()
        self._makes_gradients = bool(inputs) or any(isinstance(x, _Own) for _, _, x in self._held_parameters)
        self.outputs: list[Pair | None] = []
        """What it returns and may have a gradient, without history; ``None`` in the places of all else."""
        self._overwritten: set[int] = set()
        """The places of inputs that the block changes in place."""
        self._made: list[Any] = []
        self._made_spec = self._spec

    def parameters(self, now: Sequence[Tensor]) -> list[Tensor]:
        """The parameters that gradients are wanted for and that are the block's own, of those given."""
        return [now[x] for _, _, x in self._held_parameters if isinstance(x, _Own)]

    def first(self, now: Sequence[Tensor]) -> tuple[Any, list[OptionalTensor]]:
        """Run the block for the first time.

        Args:
            now: what stands for the parameters that gradients are wanted for.

        Returns:
            As :meth:`handed_on`.

        Raises:
            TypeError: it returns something else than a tree of tensors and numbers.
        """
        # Only buffers that the block overwrites are needed as they were; those of large constants are not kept twice.
        before = [(x, x.clone()) for _, _, x in self._held_buffers if x is not None]
        # Forward mode would hold a graph of tangents until its level is left, by a circle of references.
        with torch.set_grad_enabled(not self._with_tangents):
            given = [leaf_of_pair(pair).clone() for pair in self.inputs]
            versions = list(map(tensor_version, given))
            args, kwargs = self._arguments(given, now)
            made, self._made_spec = pytree.flatten(self._forward(*args, **kwargs))
            after = zip(given, versions, strict=True)
            self._overwritten = {
                place
                for place, (x, version) in enumerate(after)
                if version is None or tensor_version(x) != version
            }
            del args, kwargs, given
        kept = {id(x): copy for x, copy in before if not torch.equal(x, copy)}
        self._held_buffers = [
            (container, key, kept.get(id(x), x)) for container, key, x in self._held_buffers
        ]
        self._after = [(generator, generator.get_state()) for generator in generators()]
        for leaf in made:
            if leaf is not None and not isinstance(leaf, (Tensor, bool, int, float, str)):
                raise TypeError(
                    f"`blocks` must return trees of tensors and numbers, got a {type(leaf).__name__} from block "
                    f"{self.name!r}"
                )
            output = None
            if isinstance(leaf, Tensor) and (leaf.requires_grad or self._may_have_gradient(leaf)):
                output = pair_of(leaf)
            self.outputs.append(output)
            self._made.append(leaf if output is None else None)
        return self.handed_on()

    def _may_have_gradient(self, made: Tensor) -> bool:
        floats = made.is_floating_point() or made.is_complex()
        return self._with_tangents and self._makes_gradients and floats

    def handed_on(self) -> tuple[Any, list[OptionalTensor]]:
        """The block's results, detached from their history.

        Returns:
            The tree, and in the places of ``outputs`` the tensors in it that require grad.
        """
        for generator, state in self._after:
            generator.set_state(state)
        cut = [None if pair is None else leaf_of_pair(pair) for pair in self.outputs]
        leaves = [x if leaf is None else leaf for x, leaf in zip(self._made, cut, strict=True)]
        return pytree.unflatten(self._made_spec, leaves), cut

    @contextmanager
    def again(self, now: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], list[Any]]]:
        """Run the block again; within the context it holds what it held, as ``torch.utils.checkpoint`` may call it.

        Args:
            now: what stands for the parameters that gradients are wanted for.

        Returns:
            Tensors in the places of ``inputs``, with no history, and in those of ``outputs`` what was made of them.
        """
        leaves = [leaf_of_pair(pair) for pair in self.inputs]

        def parameter(x: Any) -> Any:
            return leaves[x] if isinstance(x, _Input) else now[x] if isinstance(x, _Own) else x

        held = [(container, key, parameter(x)) for container, key, x in self._held_parameters]
        with _in_place([*held, *self._held_buffers]):
            for generator, state in self._before:
                generator.set_state(state)
            with _autocast_as(self._autocast):
                given = [x.clone() if place in self._overwritten else x for place, x in enumerate(leaves)]
                args, kwargs = self._arguments(given, now)
                made, _spec = pytree.flatten(self._forward(*args, **kwargs))
            del args, kwargs, given
            yield leaves, made

    def _arguments(self, given: Sequence[Tensor], now: Sequence[Tensor]) -> Any:
        def argument(x: Any) -> Any:
            return given[x] if isinstance(x, _Input) else now[x] if isinstance(x, _Own) else x

        return pytree.unflatten(self._spec, list(map(argument, self._given)))


def _held(containers: list[TensorContainer]) -> Held:
    return [(container, key, x) for container in containers for key, x in container.items()]


@contextmanager
def _in_place(held: Held) -> Iterator[None]:
    """A context in which a module has the tensors that it had."""
    now = [(container, key, container[key]) for container, key, _ in held]
    for container, key, x in held:
        container[key] = x
    try:
        yield
    finally:
        for container, key, x in now:
            container[key] = x


def _autocast_now() -> dict[str, torch.dtype | None]:
    """Device → dtype, ``None`` where it is off."""
    return {
        device: torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        for device in ("cpu", "cuda")
    }


@contextmanager
def _autocast_as(wanted: dict[str, torch.dtype | None]) -> Iterator[None]:
    now = _autocast_now()
    with ExitStack() as stack:
        for device, dtype in wanted.items():
            if dtype != now[device]:
                stack.enter_context(torch.autocast(device, dtype, enabled=dtype is not None))
        yield
