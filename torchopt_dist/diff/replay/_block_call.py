"""A call of a block → the same call again: with the arguments, random numbers, parameters and modes that it had.

Inside ``vmap``, what there is of a tensor outside of it are the values of all samples: only these have a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchopt_dist import pytree
from torchopt_dist._generators import restore, states
from torchopt_dist._random_turns import change_generators
from torchopt_dist._torch_private import outside_of_transforms, tensor_version, transforms_are_active, vmaps
from torchopt_dist._types import OptionalTensor, TensorContainer
from torchopt_dist._vmap import Values, values_of
from torchopt_dist.diff.replay._duals import Pair, leaf_of_pair, pair_of
from torchopt_dist.nn import _tensor_dicts

__all__ = ["BlockCall", "block_of", "inputs_of"]


class _Input(NamedTuple):
    """A placeholder for an input of the block."""

    place: int
    dims: tuple[int | None, ...]
    """Which dimensions count samples, as in :class:`Values`."""


class _Own(NamedTuple):
    """A placeholder for a parameter whose gradient is wanted."""

    place: int
    dims: tuple[int | None, ...]


Held = list[tuple[TensorContainer, str, Any]]


def inputs_of(block: nn.Module, arguments: Any, own: Collection[int]) -> list[Values]:
    """What a call of a block depends on and requires grad, each once: arguments, parameters that the loss has put in.

    Args:
        block: the module.
        arguments: positional and keyword arguments.
        own: the ``id`` of the values of each parameter that is not counted.
    """
    held = [x for _, _, x in _held(_tensor_dicts.parameter_containers(block))]
    levels = vmaps()
    found = [values_of(x, levels) for x in [*pytree.flatten(arguments)[0], *held] if isinstance(x, Tensor)]
    wanted = [x for x in found if x.values.requires_grad and id(x.values) not in own]
    return list({(id(x.values), x.dims): x for x in wanted}.values())


class BlockCall:
    """One call of a block.

    Args:
        name: the name of the block, for errors.
        block: the module.
        forward: the function that computes it.
        arguments: its positional arguments, its keyword arguments.
        own: the ``id`` of the values of a parameter that gradients are wanted for → its place among these.
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
        with _outside():
            self.inputs = [pair_of(x.values) for x in inputs]
            """What :func:`inputs_of` finds, without history."""
        places = {(id(x.values), x.dims): place for place, x in enumerate(inputs)}
        levels = vmaps()

        def marked(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            values, dims = values_of(x, levels)
            if id(values) in own:
                return _Own(own[id(values)], dims)
            place = places.get((id(values), dims))
            return x if place is None else _Input(place, dims)

        given, self._spec = pytree.flatten(arguments)
        self._given = list(map(marked, given))
        self._held_parameters = [
            (container, key, marked(x))
            for container, key, x in _held(_tensor_dicts.parameter_containers(block))
        ]
        self._held_buffers = _held(_tensor_dicts.buffer_containers(block))
        self._before = states()
        self._after = self._before
        self._autocast = _autocast_now()
        self._makes_gradients = bool(inputs) or any(isinstance(x, _Own) for _, _, x in self._held_parameters)
        self.outputs: list[Pair | None] = []
        """What it returns and may have a gradient, without history; ``None`` in the places of all else."""
        self._dims: list[tuple[int | None, ...]] = []
        """Which dimensions of the outputs count samples."""
        self.overwritten: set[int] = set()
        """The places of inputs that the block changes in place, or may have changed."""
        self._made: list[Any] = []
        self._made_spec = self._spec

    def parameters(self, now: Sequence[Tensor]) -> list[Tensor]:
        """The parameters that gradients are wanted for and that are the block's own, of those given."""
        return [now[x.place] for _, _, x in self._held_parameters if isinstance(x, _Own)]

    def first(self, now: Sequence[Tensor]) -> tuple[Any, list[OptionalTensor]]:
        """Run the block for the first time.

        Args:
            now: what stands for the parameters that gradients are wanted for.

        Returns:
            As :meth:`handed_on`.

        Raises:
            TypeError: it returns something else than a tree of tensors and numbers.
            ValueError: it changes a list or a dictionary that it is given, or a tensor without a gradient.
        """
        # Only buffers that the block overwrites are needed as they were; those of large constants are not kept twice.
        levels = vmaps()
        with _outside():
            buffers = [(x, values_of(x, levels)) for _, _, x in self._held_buffers if x is not None]
            before = [(x, held, held.values.clone()) for x, held in buffers]
        # Forward mode would hold a graph of tangents until its level is left, by a circle of references.
        with torch.set_grad_enabled(not self._with_tangents):
            standing = list(now)
            with _outside():
                given = [self._marked(leaf_of_pair(pair).clone()) for pair in self.inputs]
                for _, _, x in self._held_parameters:
                    if isinstance(x, _Own) and standing[x.place] is now[x.place]:
                        standing[x.place] = self._marked(now[x.place].view_as(now[x.place]))
            arguments = self._arguments(given, standing)
            leaves = pytree.flatten(arguments)[0]
            versions = [*map(tensor_version, given)], [*map(_version, self._given)]
            with _in_place(self._held(given, standing)):
                made, self._made_spec = pytree.flatten(self._forward(*arguments[0], **arguments[1]))
            after = zip(given, versions[0], strict=True)
            self.overwritten = {
                place
                for place, (x, version) in enumerate(after)
                if version is None or tensor_version(x) != version
            }
            self._check_given(arguments, leaves, versions[1])
            del arguments, leaves, given, standing
        with _outside():
            changed = [(x, held, copy) for x, held, copy in before if not torch.equal(held.values, copy)]
        kept = {id(x): held.tensor(copy) for x, held, copy in changed}
        self._held_buffers = [
            (container, key, kept.get(id(x), x)) for container, key, x in self._held_buffers
        ]
        self._after = states()
        for leaf in made:
            if leaf is not None and not isinstance(leaf, (Tensor, bool, int, float, str)):
                raise TypeError(
                    f"`blocks` must return trees of tensors and numbers, got a {type(leaf).__name__} from block "
                    f"{self.name!r}"
                )
            output = None
            dims: tuple[int | None, ...] = ()
            if isinstance(leaf, Tensor):
                values, dims = values_of(leaf, levels)
                with _outside():
                    if values.requires_grad or self._may_have_gradient(values):
                        output = pair_of(values)
            self.outputs.append(output)
            self._dims.append(dims)
            self._made.append(leaf if output is None else None)
        return self.handed_on()

    def _marked(self, x: Tensor) -> Tensor:
        """The same tensor; :func:`block_of` finds the block by the node that made it."""
        node: Any = x.grad_fn
        if node is not None:
            node.metadata[_MARK] = self.name
        return x

    def _check_given(self, arguments: Any, before: Sequence[Any], versions: Sequence[int | None]) -> None:
        """Check that arguments are as they were, but for inputs, of which the block has copies."""
        leaves, spec = pytree.flatten(arguments)
        same = spec == self._spec and all(x is y for x, y in zip(leaves, before, strict=True))
        if same and list(map(_version, self._given)) == versions:
            return
        what = "a tensor" if same else "a list or a dictionary"
        raise ValueError(
            f"`blocks` must return what they make: block {self.name!r} changes {what} that it is given; return the "
            "changed one from its forward"
        )

    def _may_have_gradient(self, made: Tensor) -> bool:
        floats = made.is_floating_point() or made.is_complex()
        return self._with_tangents and self._makes_gradients and floats

    def handed_on(self) -> tuple[Any, list[OptionalTensor]]:
        """The block's results, detached from their history.

        Returns:
            The tree, and in the places of ``outputs`` the values of the tensors in it that require grad.
        """
        change_generators(restore, self._after)
        with _outside():
            cut = [None if pair is None else leaf_of_pair(pair) for pair in self.outputs]
        leaves = [
            x if leaf is None else Values(leaf, dims).tensor()
            for x, leaf, dims in zip(self._made, cut, self._dims, strict=True)
        ]
        return pytree.unflatten(self._made_spec, leaves), cut

    @contextmanager
    def again(
        self, now: Sequence[Tensor], inside: Callable[[Callable[[], list[Any]]], list[Any]]
    ) -> Iterator[tuple[list[Tensor], list[Any]]]:
        """Run the block again; within the context it holds what it held, as ``torch.utils.checkpoint`` may call it.

        Args:
            now: what stands for the parameters that gradients are wanted for.
            inside: calls a function as the loss is called, inside the same levels of ``vmap``.

        Returns:
            Tensors in the places of ``inputs``, with no history, and in those of ``outputs`` what was made of them.
        """
        leaves = [leaf_of_pair(pair) for pair in self.inputs]

        def held() -> Held:
            return self._held(leaves, now)

        def called() -> list[Any]:
            with _outside():
                given = [x.clone() if place in self.overwritten else x for place, x in enumerate(leaves)]
            args, kwargs = self._arguments(given, now)
            try:
                made = pytree.flatten(self._forward(*args, **kwargs))[0]
            except Exception as error:
                error.add_note(
                    f"`blocks` calls block {self.name!r} again with the arguments that it had, and this call failed: a "
                    "block must not change what it is given, such as a cache; call a model of Hugging Face with "
                    "`use_cache=False`"
                )
                raise
            return [values_of(x).values if isinstance(x, Tensor) else x for x in made]

        with _in_place([*inside(held), *self._held_buffers]):
            change_generators(restore, self._before)
            with _autocast_as(self._autocast):
                made = inside(called)
            yield leaves, made

    def _held(self, given: Sequence[Tensor], now: Sequence[Tensor]) -> Held:
        return [(container, key, _put(x, given, now)) for container, key, x in self._held_parameters]

    def _arguments(self, given: Sequence[Tensor], now: Sequence[Tensor]) -> Any:
        return pytree.unflatten(self._spec, [_put(x, given, now) for x in self._given])


_MARK = "torchopt_dist.block"
"""The key in a node's own dictionary that says in which block's run a graph begins there."""
_MARKED = ("CloneBackward0", "ViewBackward0")


def block_of(node: Any) -> str | None:
    """The block in whose first run a graph begins with this node; ``None`` for other nodes."""
    return node.metadata.get(_MARK) if type(node).__name__ in _MARKED else None


def _version(x: Any) -> int | None:
    return tensor_version(x) if isinstance(x, Tensor) and not x.is_inference() else None


def _put(x: Any, given: Sequence[Tensor], now: Sequence[Tensor]) -> Any:
    """What stands for a placeholder."""
    if isinstance(x, _Input):
        return Values(given[x.place], x.dims).tensor()
    return Values(now[x.place], x.dims).tensor() if isinstance(x, _Own) else x


def _outside() -> AbstractContextManager[object]:
    """A context in which values are no tensors of a ``vmap``."""
    return outside_of_transforms() if transforms_are_active() else nullcontext()


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
