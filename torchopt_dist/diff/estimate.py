"""A loop, a few adjoints → the peak memory and the seconds of the whole loop with each, from runs of three steps.

What grows with the steps grows by as much with each, so a loop of two and one of three say what a hundred take. Memory
is that of tensors, counted as they come and go. The plan of a replay is known, and how many of its steps run again.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from torchopt_dist import pytree
from torchopt_dist.arguments.numbers import integer
from torchopt_dist.core.random_turns import kept_generators
from torchopt_dist.core.types import OptState, Params
from torchopt_dist.core.vmap import differentiable
from torchopt_dist.diff.adjoints import Adjoint, Implicit, Recorded, Replayed, Truncated
from torchopt_dist.diff.adjoints._declared import tensors_of_meta, tensors_within
from torchopt_dist.diff.adjoints._store import lengths, number_of_bytes, unit_of
from torchopt_dist.diff.inner_loop import batches_and_steps, inner_loop
from torchopt_dist.process.table import bytes_text, seconds_text, table
from torchopt_dist.torch_private import memory_of_results
from torchopt_dist.transform.base import GradientTransformation

__all__ = ["Estimate", "Estimates", "estimate"]

Line: TypeAlias = tuple[float, float]
MEASURED = 3
"""Steps of the longest loop that is measured; the steps of so short a replay are recorded one by one."""
ENOUGH = 0.2  # seconds after which a time is not measured once more


@dataclass(frozen=True)
class Estimate:
    """What a loop with one adjoint takes.

    Attributes:
        adjoint: the adjoint.
        memory: the most bytes of tensors that there are at a time beside those that there were before, in the loop, the
            outer loss and its backward pass; ``None`` where the adjoint does not work for this loop.
        seconds: how long these three take together on this machine; ``None`` likewise.
        exact: whether the gradient is that of the whole loop.
        why_not: why the adjoint does not work for this loop, or an empty text.
    """

    adjoint: Adjoint
    memory: int | None = None
    seconds: float | None = None
    exact: bool = False
    why_not: str = ""

    @property
    def name(self) -> str:
        """The adjoint as one writes it, with the settings that are not the default."""
        adjoint: Any = self.adjoint
        chosen = []
        for field in fields(adjoint) if is_dataclass(adjoint) else ():  # one of a user's own may be none
            value = getattr(adjoint, field.name)
            if isinstance(value, nn.Module) or value != field.default:
                chosen.append(f"{'' if field.default is MISSING else field.name + '='}{value!r:.40}")
        return f"{type(adjoint).__name__}({', '.join(chosen)})"


class Estimates(tuple[Estimate, ...]):
    """An :class:`Estimate` for each adjoint; ``print`` shows a table."""

    __slots__ = ()

    def __str__(self) -> str:
        rows, others = [], []
        for one in self:
            if one.memory is None or one.seconds is None:
                others.append(f"{one.name} does not work here: {one.why_not}")
            else:
                says = "yes" if one.exact else "no"
                rows.append([one.name, bytes_text(one.memory), seconds_text(one.seconds), says])
        return "\n".join([*([table(["adjoint", "memory", "time", "exact"], rows)] if rows else []), *others])

    def fits(self, memory: int | str) -> Estimates:
        """The rows of adjoints that need at most so much memory, the fastest first.

        Args:
            memory: a number of bytes, or a text such as ``'8GiB'``.

        Raises:
            TypeError: it is neither a number nor a text.
            ValueError: it has no such unit, or is not above 0.
        """
        most = number_of_bytes(memory)
        rows = [one for one in self if one.memory is not None and one.memory <= most]
        return Estimates(sorted(rows, key=lambda one: one.seconds or 0.0))


def estimate(
    loss: Callable[..., Any],
    optimizer: GradientTransformation,
    params: Params | nn.Module,
    batches: Sequence[Any] | Iterable[Any] | Callable[[int], Any] | int,
    *,
    outer: Callable[[Any], Tensor] | None = None,
    meta: Any = None,
    adjoints: Sequence[Adjoint] | None = None,
    state: OptState | None = None,
    has_aux: bool = False,
    steps: int | None = None,
) -> Estimates:
    """Estimate what an inner loop and its gradient take with each adjoint, without running the whole loop.

    For each adjoint a loop of two steps and one of three are run and differentiated, a few times each. Counted is the
    memory of torch's tensors on the device of the parameters: neither what a library allocates for itself is in it, nor
    what was there before, such as batches in a list. The program's random numbers and ``.grad`` stay as they are.

    Args:
        loss: as in :func:`inner_loop`, as are the next three.
        optimizer: a gradient transformation.
        params: the initial parameters: a module or a tree of tensors.
        batches: the batches, or the number of steps. Of an iterable that can be read once, the first three are read.
        outer: the adapted parameters → the outer loss, a tensor of one element; the inner loss on the first batch, if
            not given.
        meta: as in :func:`inner_loop`.
        adjoints: those to compare. If not given: ``Recorded()``, ``Replayed()``, the same with few snapshots and with
            ``blocks="auto"``, ``Truncated`` through a tenth of the steps, and ``Implicit()``.
        state: as in :func:`inner_loop`.
        has_aux: as there.
        steps: as there.

    Returns:
        A row an adjoint. ``print`` shows them as a table, and ``fits("8GiB")`` has those that fit, the fastest first.

    Raises:
        Exception: as :func:`inner_loop`. An adjoint that does not work for this loop is no error: its row says why.
        NotImplementedError: this torch does not say what its operations return.

    Example:
        >>> import torch, torchopt_dist as todist
        >>> net = torch.nn.Linear(1000, 1)
        >>> loss = lambda net, x: net(x).square().mean()
        >>> found = todist.estimate(loss, todist.adam(lr=0.1), net, lambda step: torch.ones(100, 1000), steps=500)
        >>> sorted(row.name for row in found.fits("20MB") if row.exact)
        ['Replayed()', 'Replayed(snapshots=23)']
    """
    given, count, small = _short(batches, integer("steps", steps, 1) if steps is not None else None)

    def of_first_batch(adapted: Any) -> Tensor:
        first = [] if given is None else [given(0) if callable(given) else given[0]]
        value: Any = loss(adapted, *first)
        return value[0] if has_aux else value

    settings = {"meta": meta, "state": state, "has_aux": has_aux, "seed": 0}
    trial = _Trial(
        functools.partial(inner_loop, loss, optimizer, params, **settings),
        small,
        outer or of_first_batch,
        lambda: of_first_batch(params),
        differentiable(params.parameters() if isinstance(params, nn.Module) else pytree.flatten(params)[0]),
        differentiable([*tensors_of_meta(meta), *tensors_within(optimizer)]),
    )
    with kept_generators(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of loops that are too short to converge
        trial.peak(None, 1)  # with errors of the loop itself
        few, part = Replayed(snapshots=math.isqrt(max(count, 1) - 1) + 1), Truncated(max(1, count // 10))
        usual = [Recorded(), Replayed(), few, Replayed(blocks="auto"), part, Implicit()]
        return Estimates(trial.row(adjoint, count) for adjoint in adjoints or usual)


def _short(batches: Any, steps: int | None) -> tuple[Any, int, Callable[[int], tuple[Any, int | None]]]:
    """Batches → these, or the first of them; the number of steps; and the arguments for so many steps."""
    if isinstance(batches, Iterable) and not hasattr(batches, "__getitem__"):
        count = steps if steps is not None else batches_and_steps(batches, None, Recorded())[1]
        first = list(itertools.islice(batches, MEASURED))
        # A new tensor at each step, as the iterable makes one.
        return first, count, lambda t: ((pytree.map_tensors(Tensor.clone, one) for one in first), t)
    given, count = batches_and_steps(batches, steps, Recorded())
    return given, count, lambda t: (t, None) if given is None else (given, t)


@dataclass(frozen=True)
class _Trial:
    """Runs of a short loop and of its gradient."""

    loop: Callable[..., Any]
    small: Callable[[int], tuple[Any, int | None]]
    outer: Callable[[Any], Tensor]
    inner: Callable[[], Tensor]
    """The inner loss on the first batch."""
    moved: list[Tensor]
    """The parameters that may have a gradient."""
    others: list[Tensor]
    """What else may have one."""

    def run(self, adjoint: Adjoint | None, steps: int) -> None:
        """Run a loop, the outer loss and its backward pass; with no adjoint the first two, as training."""
        batches, number = self.small(steps)
        with torch.set_grad_enabled(adjoint is not None):
            made = self.loop(batches, steps=number, adjoint=adjoint or Recorded())  # kept, as a program does
            value = self.outer(made.params)
        if adjoint is not None:
            wanted = [*(self.moved if adjoint.first_has_gradient else []), *self.others]
            if not wanted or not value.requires_grad:
                raise ValueError("nothing gets a gradient from it: list what is learned in `meta`")
            torch.autograd.grad(value, wanted, allow_unused=True)

    def peak(self, adjoint: Adjoint | None, steps: int) -> float:
        """The most bytes of new tensors that there are at a time."""
        device = next((one.device for one in self.moved), torch.device("cpu"))
        with memory_of_results(device) as most:
            if most is None:
                raise NotImplementedError(
                    "`estimate` needs TorchDispatchMode, which this torch does not have"
                )
            self.run(adjoint, steps)
            return most()

    def seconds(self, adjoint: Adjoint | None, steps: int) -> float:
        """How long it takes, the fastest of up to three times."""
        took: list[float] = []
        while len(took) < 3 and sum(took) < ENOUGH:
            start = time.perf_counter()
            self.run(adjoint, steps)
            if self.moved[0].is_cuda:
                torch.cuda.synchronize(self.moved[0].device)
            took.append(time.perf_counter() - start)
        return min(took)

    def row(self, adjoint: Adjoint, count: int) -> Estimate:
        """What a loop of ``count`` steps takes."""
        through = min(adjoint.steps, count) if isinstance(adjoint, Truncated) else count
        exact = isinstance(adjoint, (Recorded, Replayed, Truncated)) and through == count
        try:
            memory, seconds = self._of_whole(adjoint, through, count)
        except (ValueError, TypeError, RuntimeError) as error:
            return Estimate(adjoint, why_not=f"{error}".partition("\n")[0])
        return Estimate(adjoint, int(memory), seconds, exact)

    def _of_whole(self, adjoint: Adjoint, through: int, count: int) -> tuple[float, float]:
        """Bytes and seconds of ``count`` steps, of which ``through`` have a graph."""
        last, before = min(MEASURED, through), int(through < count)

        def short(steps: int) -> tuple[Adjoint, int]:
            if isinstance(adjoint, Truncated):
                return replace(adjoint, steps=steps), steps + before
            if isinstance(adjoint, Implicit):
                return replace(adjoint, not_converged="ignore"), steps
            if isinstance(adjoint, Replayed):
                return replace(adjoint, memory=None, snapshots="all"), steps
            return adjoint, steps

        at_last, more = _line(self.peak, short, last, last - 1)
        seconds, longer = _line(self.seconds, short, last, 1)
        memory, rest, kept, left, plain = at_last, max(0, count - through - before), through, 0.0, 0.0
        if rest or (isinstance(adjoint, Replayed) and count > last):
            # What a step without a graph leaves, its loss and what else is returned; and how long it takes.
            left = _line(self.peak, lambda steps: (None, steps), MEASURED, MEASURED - 1)[1]
            plain = _line(self.seconds, lambda steps: (None, steps), MEASURED, 1)[1]
        if isinstance(adjoint, Replayed) and count > last:
            more, memory = max(0.0, more - left), memory + left * (count - last)
            unit, kept, rest = self._plan(adjoint, count, more)
            if kept < -(-count // unit):  # a segment that is run again has copies of its own
                memory += self.peak(replace(adjoint, memory=None, snapshots=1), last) + 2 * more - at_last
            if unit > 1:  # whose graph is that of recording
                recorded = functools.partial(_line, short=lambda steps: (Recorded(), steps), last=MEASURED)
                memory += recorded(self.peak, least=MEASURED - 1)[1] * (unit - 1)
                longer = plain + recorded(self.seconds, least=1)[1]
        else:
            memory += left * rest
        return memory + more * (kept - last), seconds + longer * (through - last) + plain * rest

    def _plan(self, adjoint: Replayed, count: int, own: float) -> tuple[int, int, int]:
        """How many steps are recorded together, how many starts are kept, how many steps run again in between."""
        unit = unit_of(self.inner(), int(own), count) if adjoint.blocks is None else 1
        units = -(-count // unit)
        slots = units if adjoint.snapshots in (None, "all") else min(int(adjoint.snapshots or 1), units)
        if adjoint.memory is not None:
            slots = max(1, min(units, int(number_of_bytes(adjoint.memory) / max(own, 1))))
        parts = enumerate(lengths(units, slots, again=False))
        return unit, slots, unit * sum(_again(part, slots - place) for place, part in parts)


def _line(measure: Callable[..., float], short: Callable[[int], Any], last: int, least: int) -> Line:
    """What a loop of ``last`` steps takes, and what each further one adds, as one of ``least`` steps says."""
    found = measure(*short(last))
    if not 0 < least < last:
        return found, 0.0
    return found, max(0.0, (found - measure(*short(least))) / (last - least))


def _again(units: int, slots: int) -> int:
    """How many units run again on the way back through a segment (Griewank and Walther, 2000)."""
    slots = max(1, min(slots, units - 1))
    r = next(r for r in itertools.count() if math.comb(slots + r, slots) >= units)
    return r * units - math.comb(slots + r, slots + 1)
