"""A loss, an optimizer, parameters, batches → adapted parameters, with a gradient that the adjoint defines.

The steps are the same whatever the adjoint; it decides what is kept of them and what a backward pass does.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from torchopt_dist.arguments.missing_names import missing_methods
from torchopt_dist.arguments.numbers import integer
from torchopt_dist.arguments.options import unless
from torchopt_dist.core.binding import Bindings
from torchopt_dist.core.programs import CompileMode, check_mode
from torchopt_dist.core.random_turns import draw_seed
from torchopt_dist.core.types import OptState, Params
from torchopt_dist.core.vjp import takes_duals
from torchopt_dist.core.vmap import differentiable
from torchopt_dist.diff.adjoints import (
    SAMA,
    Adjoint,
    FiniteDifference,
    FirstOrder,
    Implicit,
    Recorded,
    Reptile,
    Truncated,
)
from torchopt_dist.diff.adjoints._checks import refuse_state_in_attributes
from torchopt_dist.diff.adjoints._declared import (
    consists_of_numbers,
    tensors_of_batches,
    tensors_of_meta,
    tensors_within,
)
from torchopt_dist.diff.adjoints._diagnosis import GradientNorms
from torchopt_dist.diff.adjoints._loop import Batches, Carry, Loop, StopFn
from torchopt_dist.diff.adjoints._micro_batches import MicroBatches
from torchopt_dist.diff.adjoints._model import model_of
from torchopt_dist.diff.adjoints._stream import Stream
from torchopt_dist.diff.compiled._loop import compiled
from torchopt_dist.diff.data_parallel import DataParallel, run_together
from torchopt_dist.process.progress_bar import StepsBar, both
from torchopt_dist.transform.base import GradientTransformation

__all__ = ["InnerLoopResult", "batches_and_steps", "inner_loop"]

READ_ONCE = (Recorded, Truncated, FirstOrder, Reptile, FiniteDifference, SAMA, Implicit)
"""The adjoints that take batches which can be read once."""


@missing_methods(
    module="params",
    model="params",
    loss="losses",
    parameters="params.parameters()",
    state_dict="params.state_dict()",
)
class InnerLoopResult(NamedTuple):
    """The result of :func:`inner_loop`."""

    params: Any
    """The adapted parameters, connected as the adjoint says: a module for a module, with the last buffers; otherwise a
    tree of the first parameters' structure. Under ``torch.no_grad`` they are leaves that require grad."""
    state: OptState
    """The optimizer's last state; give it to another :func:`inner_loop` to go on."""
    losses: Tensor
    """The inner losses, of shape (steps,), each before its step's update; connected where the adjoint is exact."""
    aux: list[Any]
    """What else the loss returned, one for each step; ``None`` a step without ``has_aux``."""

    @property
    def gradient_norms(self) -> Tensor:
        """The norm of the outer gradient of the parameters after each step, of shape (steps,), float64.

        It is that of the last backward pass, and empty before one. It is not a number for a step through which no
        gradient has passed, such as the first ones of :class:`~torchopt_dist.Truncated`. A loop without
        ``diagnose=True`` has none, and raises ``ValueError``.
        """
        raise ValueError("`gradient_norms` are there after `inner_loop(..., diagnose=True)`")

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise ``TypeError``: who calls the result means the adapted module."""
        raise TypeError("`InnerLoopResult` is not callable: the adapted module is `result.params`")


class _DiagnosedResult(InnerLoopResult):
    """The result of :func:`inner_loop` with ``diagnose=True``."""

    _norms: GradientNorms

    @property
    def gradient_norms(self) -> Tensor:
        """See :attr:`InnerLoopResult.gradient_norms`."""
        return self._norms.values()

    @classmethod
    def of(cls, result: InnerLoopResult, norms: GradientNorms) -> _DiagnosedResult:
        """The result with norms."""
        made = cls(*result)
        made._norms = norms
        return made

    def _replace(self, **fields: Any) -> _DiagnosedResult:
        return _DiagnosedResult.of(super()._replace(**fields), self._norms)


def _without_batches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    if len(args) > 3 or "batches" in kwargs or "steps" not in kwargs:
        return None
    steps = f"{kwargs['steps']!r:.80}"
    return (
        f"inner_loop needs `batches`: for a loss without data write the number of steps in their place, "
        f"`inner_loop(loss, optimizer, params, {steps})`"
    )


@unless(_without_batches)
def inner_loop(
    loss: Callable[..., Any],
    optimizer: GradientTransformation,
    params: Params | nn.Module,
    batches: Sequence[Any] | Iterable[Any] | Callable[[int], Any] | int,
    *,
    meta: Any = None,
    adjoint: Adjoint = Recorded(),
    state: OptState | None = None,
    has_aux: bool = False,
    seed: int | None = None,
    steps: int | None = None,
    stop: StopFn | None = None,
    compile: CompileMode = False,
    parallel: DataParallel | None = None,
    diagnose: bool = False,
    accumulate: int | None = None,
    progress: bool = False,
    callback: Callable[[int, Tensor], Any] | None = None,
) -> InnerLoopResult:
    """Train for some steps, so that gradients flow through the training.

    Gradients flow to the initial parameters, to what ``meta`` lists, to hyper-parameters of the optimizer given as
    tensors, to the initial state, and to tensors of ``batches`` that require grad. The adjoint decides how gradients
    are taken, and at what cost; the values that the loop computes are the same for all adjoints.

    Args:
        loss: ``loss(params, batch)``, or ``loss(params)`` if ``batches`` is a number, → a tensor of one element; with
            ``has_aux`` a pair of such a tensor and any value. The loss may close over what ``meta`` lists.
        optimizer: a gradient transformation, such as ``todist.adam(lr=0.1)``; hyper-parameters are numbers, tensors or
            schedules.
        params: the initial parameters: a module, which is not changed, or a tree of tensors. Parameters that do not
            require grad are frozen, and tied parameters are moved once.
        batches: a sequence with one batch for each step, such as a list, or a tensor whose rows are the batches; a
            function from the step's number, counted from 0, to its batch; or the number of steps, for a loss without
            data. Adjoints that run steps again read their batches again. All others, which are all but
            :class:`~torchopt_dist.Replayed` and the evolution strategies, also take an iterable that can be read once,
            such as a ``DataLoader`` or a generator; its random numbers are those of the steps, but for the first batch.
        meta: a tree of tensors and modules from outside that ``loss`` or a function ``batches`` uses, and that are to
            get gradients.
        adjoint: how the gradient is taken: :class:`~torchopt_dist.Recorded`, :class:`~torchopt_dist.Replayed`,
            :class:`~torchopt_dist.Truncated`, :class:`~torchopt_dist.FirstOrder`, :class:`~torchopt_dist.Reptile`,
            :class:`~torchopt_dist.FiniteDifference`, :class:`~torchopt_dist.SAMA`, :class:`~torchopt_dist.Implicit`,
            :class:`~torchopt_dist.EvolutionStrategies`, :class:`~torchopt_dist.PersistentEvolutionStrategies`.
        state: the optimizer's initial state, from ``optimizer.init`` or an earlier result.
        has_aux: whether the loss returns a pair.
        seed: an integer from which, with the step's number, each step's own seed is made; if not given, it is drawn
            from torch's generator. The steps leave the generators as they were.
        steps: the number of steps. It is needed if ``batches`` is a function or has no length, and is at most the
            length of a sequence.
        stop: called after each step with its number and its loss; if it returns true, that step is the last one.
        compile: compile the steps by ``torch.compile``: the first step of a kind takes some 3 to 15 s, and later ones
            half of the time in a small network. Where the compiler refuses, a warning says why, and the steps run
            as without. ``"reduce-overhead"`` captures them as CUDA graphs on a GPU, and is the same as ``True`` on a
            CPU. See the page on compiled loops for what is refused, and for what a step must not do.
        parallel: :class:`~torchopt_dist.DataParallel`, where all ranks of a process group run this loop together, each
            with its part of each batch.
        diagnose: find out where a meta-gradient vanishes or explodes: after a backward pass the result's
            ``gradient_norms`` are the norms of the outer gradient of the parameters after each step, and a
            ``RuntimeWarning`` says so where one is 10,000 times that after the last step, or not finite. It makes steps
            slower, and sees nothing inside ``vmap``.
        accumulate: the number of micro-batches of a step. Each batch is split along dimension 0 into so many parts,
            whose sizes differ by at most one, and a step is one update by the gradient of the whole batch. In the
            backward pass, too, there is the graph of one part at a time, which is computed twice for it. A mean is
            weighted by the parts' sizes; a loss whose examples count differently, as sequences with padding do, returns
            a pair ``(sum, count)``, and the loss of the step is the quotient of their sums. Each part has random
            numbers of its own, buffers go from part to part, and ``aux`` has a list, with what the loss returned for
            each part. ``meta`` must list every tensor that the loss uses from outside and that requires grad.
        progress: whether to show steps, loss and seconds left: as a bar in a terminal or a notebook, and elsewhere, as
            well as on other ranks than 0, by records of ``logging`` at level INFO, one in ten seconds; needs tqdm.
        callback: called after each step with its number and its loss, once a step, whatever the adjoint runs again.

    Returns:
        The adapted parameters, the last state, the losses, and the other values that the loss returned.

    Raises:
        TypeError: an argument has the wrong type; ``batches`` can be read once only, and the adjoint reads them again;
            the loss does not return a tensor, or, with ``has_aux``, a pair.
        ValueError: there are no parameters to move; ``batches`` has fewer than ``steps``; the loss has more than one
            element, or does not depend on the parameters; ``accumulate`` is below 1, is given with ``compile``, or a
            batch has nothing that can be split.
        NotImplementedError: the adjoint is not :class:`~torchopt_dist.Recorded`, and a level of forward-mode
            differentiation is open.

    Example:
        >>> import torch, torchopt_dist as todist
        >>> lr = torch.tensor(0.25, requires_grad=True)
        >>> w = torch.tensor(1.0, requires_grad=True)
        >>> adapted = inner_loop(lambda w: w**2, todist.sgd(lr=lr), w, 2)  # w * (1 - 2 * lr)**2
        >>> torch.autograd.grad(adapted.params, (w, lr))
        (tensor(0.2500), tensor(-2.))
    """
    # torch.compile goes on after the loop: it takes no second derivatives.
    run = torch.compiler.disable(_inner_loop) if torch.compiler.is_compiling() else _inner_loop
    # An error of one rank is told to the others, which would wait for it.
    with parallel.ranks.failing() if isinstance(parallel, DataParallel) else nullcontext():
        made: InnerLoopResult = run(
            loss,
            optimizer,
            params,
            batches,
            meta,
            adjoint,
            state,
            has_aux,
            seed,
            steps,
            stop,
            compile,
            parallel,
            diagnose,
            accumulate,
            progress,
            callback,
        )
    return made


def _inner_loop(
    loss: Any,
    optimizer: Any,
    params: Any,
    batches: Any,
    meta: Any,
    adjoint: Any,
    state: OptState | None,
    has_aux: bool,
    seed: int | None,
    steps: int | None,
    stop: Any,
    compile: Any,
    parallel: Any,
    diagnose: Any,
    accumulate: Any,
    progress: Any,
    callback: Any,
) -> InnerLoopResult:
    if not callable(loss):
        raise TypeError(
            f"`loss` must be a function, got {type(loss).__name__}{_order(loss, params, batches)}"
        )
    if not isinstance(optimizer, GradientTransformation):
        raise TypeError(
            f"`optimizer` must be a gradient transformation, such as todist.adam(lr=0.1), got "
            f"{_type_name(optimizer)}{_order(loss, params, batches)}"
        )
    if not isinstance(adjoint, Adjoint):
        raise TypeError(f"`adjoint` must be an adjoint, such as todist.Recorded(), got {_type_name(adjoint)}")
    if stop is not None and not callable(stop):
        raise TypeError(
            f"`stop` must be a function of a step's number and its loss, got {type(stop).__name__}"
        )
    if callback is not None and not callable(callback):
        raise TypeError(
            f"`callback` must be a function of a step's number and its loss, got {type(callback).__name__}"
        )
    if not isinstance(progress, bool):
        raise TypeError(f"`progress` must be True or False, got {type(progress).__name__} {progress!r:.80}")
    if not isinstance(has_aux, bool):
        raise TypeError(f"`has_aux` must be True or False, got {type(has_aux).__name__} {has_aux!r}")
    check_mode(compile)
    if parallel is not None and not isinstance(parallel, DataParallel):
        raise TypeError(f"`parallel` must be a todist.DataParallel, got {_type_name(parallel)}")
    if parallel is not None and compile:
        raise ValueError(
            "`compile` must be False with `parallel`: a step that sends messages is not compiled"
        )
    if not isinstance(diagnose, bool):
        raise TypeError(f"`diagnose` must be True or False, got {type(diagnose).__name__} {diagnose!r}")
    if diagnose and compile:
        raise ValueError(
            "`diagnose` must be False with `compile`: a compiled step shows no gradients inside it"
        )
    if diagnose and parallel is not None and parallel.shard is not None:
        raise ValueError(
            "`diagnose` must be False with `shard` of DataParallel: each rank sees a part of the gradients"
        )
    micro_batches = None if accumulate is None else _micro_batches(accumulate, batches, compile)
    norms = GradientNorms() if diagnose else None
    if norms is not None:
        optimizer, state = norms.watch(optimizer, state)
    given, count = batches_and_steps(batches, steps, adjoint)
    model = model_of(params)
    if parallel is not None:
        model = parallel.parted(model, optimizer, adjoint)
    first = model.tree(model.leaves)
    begin = Carry(model.leaves, optimizer.init(first) if state is None else state, model.buffers)
    loop = Loop(
        loss=loss,
        optimizer=optimizer,
        model=model,
        batches=given,
        steps=count,
        stop=stop,
        has_aux=has_aux,
        seed=draw_seed() if seed is None else integer("seed", seed),
        first=begin,
        state_is_given=state is not None,
        declared=tuple(
            differentiable([*tensors_of_meta(meta), *tensors_within(optimizer), *tensors_of_batches(given)])
        ),
        accumulation=micro_batches,
    )
    if takes_duals() and not isinstance(adjoint, Recorded):
        raise NotImplementedError(
            f"an inner loop with todist.{type(adjoint).__name__} has no forward-mode derivative: use reverse mode, or "
            "todist.Recorded()"
        )
    if compile:
        loop = compiled(loop, compile, progress=progress)
    recording = torch.is_grad_enabled()
    runs_again = recording and (adjoint.runs_again or accumulate is not None)
    bindings, held = None, []
    if runs_again:
        loop, bindings = _with_names_as_now(loop)
        held = loop.model.held()
    if parallel is not None:
        loop = parallel.spread(loop, adjoint, meta)
    bar = StepsBar("inner_loop", count) if progress else None
    if bar is not None or callback is not None:
        loop = replace(loop, tell=both(bar, callback))
    with nullcontext() if bar is None else closing(bar):
        if not recording:
            outcome = loop.run(loop.training_step, loop.own(loop.first))
        else:
            outcome = adjoint.run(loop) if parallel is None else run_together(loop, adjoint)
    if recording and not (loop.declared or adjoint.first_has_gradient):
        _warn_of_nothing(type(adjoint).__name__)
    if bindings is not None:
        what = f"todist.{type(adjoint).__name__}()" if adjoint.runs_again else "`accumulate`"
        refuse_state_in_attributes(loop, outcome.losses, held, what)
        bindings.settle()
    losses = _all_in_one(outcome.losses)
    # Where nothing is recorded, too, another loop can train the parameters on.
    carry = outcome.carry if recording else loop.cut(outcome.carry)
    adapted = loop.model.result(carry.params, carry.buffers, last=not runs_again)
    last_state = loop.state_for_caller(carry.state)
    if norms is not None:
        return _DiagnosedResult.of(
            InnerLoopResult(adapted, last_state.inner_state, losses, outcome.aux), norms
        )
    return InnerLoopResult(adapted, last_state, losses, outcome.aux)


def _with_names_as_now(loop: Loop) -> tuple[Loop, Bindings]:
    """The same loop, whose functions find what their names mean now if they run again; and these names."""
    batches = loop.batches
    optimizer = None if consists_of_numbers(loop.optimizer) else loop.optimizer
    is_function = callable(batches) and not isinstance(batches, Stream)
    data = [batches] if is_function else tensors_of_batches(batches)
    bindings = Bindings(loop.loss, loop.stop, optimizer, *data)
    if is_function:
        batches = bindings.of(batches)
    elif isinstance(batches, list):
        batches = [*batches]
    bound = replace(
        loop,
        loss=bindings.of(loop.loss),
        batches=batches,
        stop=bindings.of(loop.stop),
        optimizer=loop.optimizer if optimizer is None else bindings.of(optimizer),
    )
    return bound, bindings


def _warn_of_nothing(name: str) -> None:
    warnings.warn(
        f"nothing gets a gradient from this loop: `{name}()` gives one only to tensors that require grad in `meta`, "
        "the optimizer and `batches`, and there is none. List what is learned, `inner_loop(..., meta=model)`, or take "
        "Recorded() for the first parameters; under `torch.no_grad()` nothing is said",
        UserWarning,
        stacklevel=5,
    )


def _all_in_one(losses: list[Tensor]) -> Tensor:
    if len(losses) == 1:
        return losses[0].unsqueeze(0)
    return torch.stack(losses) if losses else torch.zeros(0)


def _order(loss: Any, params: Any, batches: Any) -> str:
    for name, value in (("loss", loss), ("params", params), ("batches", batches)):
        if isinstance(value, GradientTransformation):
            order = "the order is `inner_loop(loss, optimizer, params, batches)`"
            return f": {order}, and `{name}` is the optimizer"
    return ""


def _type_name(thing: Any) -> str:
    kind = thing if isinstance(thing, type) else type(thing)
    if issubclass(kind, torch.optim.Optimizer) and kind.__module__.startswith("torch.optim."):
        own = kind.__name__.lower()
        ours = sys.modules[__name__.partition(".")[0]]
        remedy = f": write `todist.{own}(lr=...)`" if hasattr(ours, own) else ""
        return f"torch.optim.{kind.__name__}{remedy}"
    return f"the class {thing.__name__}: call it" if isinstance(thing, type) else type(thing).__name__


def _micro_batches(accumulate: Any, batches: Any, compile: Any) -> MicroBatches:
    if isinstance(accumulate, bool) or not isinstance(accumulate, int):
        raise TypeError(f"`accumulate` must be a number of micro-batches, got {type(accumulate).__name__}")
    if accumulate < 1:
        raise ValueError(f"`accumulate` must be at least 1 micro-batch, got {accumulate}")
    if isinstance(batches, int) and not isinstance(batches, bool):
        raise ValueError(
            f"`accumulate` splits batches, and `batches` is a number of steps, {batches}: give a batch for each step"
        )
    if compile:
        raise ValueError(
            "`compile` must be False with `accumulate`, whose micro-batches are differentiated one by one"
        )
    return MicroBatches(accumulate)


def batches_and_steps(batches: Any, steps: Any, adjoint: Adjoint) -> tuple[Batches, int]:
    """The arguments of a loop → its batches, ``None`` for a loss without data, and the number of its steps.

    Raises:
        TypeError: ``batches`` are nothing of this kind, or can be read once and the adjoint reads them again.
        ValueError: the number of steps is missing, given twice, negative, or above that of the batches.
    """
    if steps is not None:
        steps = integer("steps", steps, 0)
    if isinstance(batches, int) and not isinstance(batches, bool):
        if batches < 0:
            raise ValueError(f"`batches` as a number of steps must be at least 0, got {batches}")
        if steps is not None:
            raise ValueError("`steps` is for `batches` that are a function or a sequence, not a number")
        return None, batches
    if isinstance(batches, Tensor) and batches.ndim == 0:
        raise TypeError("`batches` must have a batch for each step, got a Tensor without dimensions")
    if hasattr(batches, "__len__") and hasattr(batches, "__getitem__"):
        count = len(batches)
        if steps is not None and steps > count:
            raise ValueError(
                f"`batches` must have one batch for each step: `steps` is {steps}, and there are {count}"
            )
        return batches, count if steps is None else steps
    if callable(batches):
        if steps is None:
            raise ValueError("`steps` must say how many steps there are, since `batches` is a function")
        return batches, steps
    if hasattr(batches, "__iter__"):
        return _stream(batches, steps, adjoint)
    raise TypeError(
        "`batches` must be a sequence, an iterable, a function of the step's number or a number of steps, got "
        f"{type(batches).__name__}"
    )


def _stream(batches: Iterable[Any], steps: int | None, adjoint: Adjoint) -> tuple[Batches, int]:
    """Batches that can be read once, in order, where no others are needed."""
    again = adjoint.batches_again if torch.is_grad_enabled() else 0
    if again is None:
        once = ", ".join(f"todist.{kind.__name__}" for kind in READ_ONCE)
        raise TypeError(
            "`batches` must be what can be read again (a sequence, a function of the step's number) with "
            f"todist.{type(adjoint).__name__}, which runs steps again, got {type(batches).__name__}: `list(...)` "
            f"makes a sequence of it; {once} read each batch once"
        )
    count = steps
    if count is None:
        try:
            count = len(batches)  # type: ignore[arg-type]
        except TypeError:
            raise ValueError(
                f"`steps` must say how many steps there are, since `batches` is a {type(batches).__name__}, which has "
                "no length"
            ) from None
    return Stream(batches, count, again), count
