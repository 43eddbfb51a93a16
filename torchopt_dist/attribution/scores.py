"""A training, queries → scores: exact ones through all steps, and cheap ones from products of gradients."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from torchopt_dist.arguments.numbers import integer
from torchopt_dist.attribution.result import Attribution
from torchopt_dist.attribution.training import Queries, Training, losses_of
from torchopt_dist.diff.adjoints import Adjoint, FirstOrder, Replayed
from torchopt_dist.distributed.group.group import find_group
from torchopt_dist.distributed.map import map as map_on_workers
from torchopt_dist.distributed.world import get_world_size
from torchopt_dist.transform.sgd import sgd

__all__ = ["Method", "attribute", "even_parts", "workers"]

Method = Literal["exact", "checkpoint", "checkpoints"]


def attribute(
    training: Training,
    queries: Queries,
    *,
    method: Method = "exact",
    adjoint: Adjoint | None = None,
    tokens: bool = False,
    together: int = 8,
    checkpoints: int = 5,
    query_names: Sequence[str] | None = None,
) -> Attribution:
    """Find out which training examples made the losses of a trained model what they are.

    ``scores[q, e]`` is the derivative of the loss of query ``q`` after the training with respect to the weight of
    example ``e`` in it. A training without the example has about the loss minus the score, so a negative score tells of
    an example that helps the query. The exact derivative goes back through all steps of the training (a metagradient:
    Engstrom et al. 2025, https://arxiv.org/abs/2503.13751; as an attribution: Ilyas and Engstrom 2025,
    https://arxiv.org/abs/2504.16430). It is that of one training, with its order of batches and its random numbers.

    Where workers run, the queries are spread over them: each trains, and goes back for its part of the queries. With
    ``parallel`` of the training, all ranks make one training instead.

    Args:
        training: the training.
        queries: ``queries(model)`` → the losses that are asked about, a vector.
        method: ``"exact"``, through all steps; or minus the products of the gradients of examples and queries, of the
            trained model, ``"checkpoint"``, or summed over some models on the way, ``"checkpoints"`` (TracIn: Pruthi et
            al. 2020, https://arxiv.org/abs/2002.08484). These know nothing of the optimizer and of the order of steps,
            and have another unit: compare their orders only, by :func:`validate`.
        adjoint: how the exact derivative is taken; ``todist.Replayed()``, if not given.
        tokens: whether there is a score for each token of each example, where the training has a ``mask`` of these.
        together: for how many queries one way back is made; more share the steps that are run again, and need
            more memory. With ``parallel`` of the training it is one at a time.
        checkpoints: how many models ``"checkpoints"`` takes, at even distances, the trained one among them.
        query_names: a name for each query; their numbers, if not given.

    Returns:
        The scores, with methods that show and save them.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: ``method`` is none of the three, or a number is below 1; and as
            :func:`~torchopt_dist.inner_loop`.

    Example:
        >>> import torch, torchopt_dist as todist
        >>> x, y = torch.tensor([[1.0], [1.0]]), torch.tensor([[1.0], [-1.0]])
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> training = todist.attribution.Training(
        ...     lambda model, index: ((model(x[index]) - y[index]) ** 2).sum(1),
        ...     todist.sgd(lr=0.1),
        ...     model,
        ...     [torch.arange(2)] * 3,
        ... )
        >>> found = todist.attribute(training, lambda model: ((model(x[:1]) - 1) ** 2).sum(1))
        >>> [name for name, score in found.top(1)]  # the example that pulls the same way
        ['0']
    """
    if not isinstance(training, Training):
        raise TypeError(
            f"`training` must be a todist.attribution.Training, got {type(training).__name__}: "
            "Training(loss, optimizer, model, batches)"
        )
    if not callable(queries):
        raise TypeError(
            f"`queries` must be a function from the trained model to losses, got {type(queries).__name__}"
        )
    if method not in get_args(Method):
        raise ValueError(f"`method` must be one of {', '.join(map(repr, get_args(Method)))}, got {method!r}")
    if adjoint is not None and not isinstance(adjoint, Adjoint):
        raise TypeError(
            f"`adjoint` must be an adjoint, such as todist.Replayed(), got {type(adjoint).__name__}"
        )
    for name, number in (("together", together), ("checkpoints", checkpoints)):
        integer(name, number, 1)
    with torch.no_grad():
        count = len(losses_of(queries, copy.deepcopy(training.model)))
    if query_names is not None and len(query_names) != count:
        raise ValueError(f"`query_names` must have {count} names, one a query, got {len(query_names)}")
    training.weights(tokens=tokens)
    if training.parallel is not None:
        together = 1  # collectives have no rule for several gradients at once
    how = _How(method, adjoint or Replayed(), tokens, together, checkpoints)
    parts = even_parts(count, workers(training))
    if len(parts) == 1:
        found = [_of_queries(parts[0], training, queries, how)]
    else:
        found = map_on_workers(_of_queries, parts, args=(training, queries, how))
    return Attribution(
        scores=torch.cat([scores for scores, _ in found]),
        query_losses=torch.cat([losses for _, losses in found]),
        method=method,
        names=tuple(training.names or map(str, range(training.units))),
        query_names=tuple(query_names or map(str, range(count))),
    )


def workers(training: Training) -> int:
    """How many workers there are for trainings; 1 where none are connected, or all ranks make each together."""
    return 1 if training.parallel is not None or find_group() is None else get_world_size()


def even_parts(count: int, parts: int) -> list[tuple[int, int]]:
    """Half-open ranges of numbers, at most so many, whose sizes differ by at most one."""
    parts = max(1, min(count, parts))
    ends = [count * place // parts for place in range(parts + 1)]
    return list(itertools.pairwise(ends))


@dataclass(frozen=True)
class _How:
    method: Method
    adjoint: Adjoint
    tokens: bool
    together: int
    checkpoints: int


def _of_queries(
    part: tuple[int, int], training: Training, queries: Queries, how: _How
) -> tuple[Tensor, Tensor]:
    """The scores of some queries, and their losses: a task of a worker."""
    with torch.enable_grad():
        if how.method == "exact":
            return _exact(part, training, queries, how)
        return _products(part, training, queries, how)


def _exact(part: tuple[int, int], training: Training, queries: Queries, how: _How) -> tuple[Tensor, Tensor]:
    weights = training.weights(tokens=how.tokens).requires_grad_()
    trained = training.run(weights, how.adjoint).params
    params = [p for p in trained.parameters() if p.requires_grad]
    losses = losses_of(queries, trained)[slice(*part)]
    return _through(params, _gradients(losses, params), weights, how.together), losses.detach()


def _products(
    part: tuple[int, int], training: Training, queries: Queries, how: _How
) -> tuple[Tensor, Tensor]:
    """One step of SGD on all examples: what it does to a query, to first order, is the product of the gradients."""
    every = torch.arange(training.examples, device=training.batches[0].device)
    size = max(1, max(map(len, training.batches)) // training.accumulate)
    step = replace(training, optimizer=sgd(lr=1.0), batches=[every], accumulate=-(-len(every) // size))
    count = how.checkpoints if how.method == "checkpoints" else 1
    steps = len(training.batches)
    wanted = {steps * place // count for place in range(1, count)}
    kept: list[dict[str, Tensor]] = []

    def keep(model: Any, number: int) -> None:
        if number in wanted:
            wanted.discard(number)
            kept.append({name: p.detach().clone() for name, p in model.named_parameters()})

    with torch.no_grad():
        last = training.run(training.weights(), FirstOrder(), keep=keep).params
        losses = losses_of(queries, last)[slice(*part)]
        kept.append({name: p.detach().clone() for name, p in last.named_parameters()})
    total: Tensor | None = None
    for values in kept:
        model = copy.deepcopy(last)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(values[name])
        at = [p for p in model.parameters() if p.requires_grad]
        wanted_rows = _gradients(losses_of(queries, model)[slice(*part)], at)
        weights = training.weights(tokens=how.tokens).requires_grad_()
        moved = replace(step, model=model).run(weights, Replayed()).params
        params = [p for p in moved.parameters() if p.requires_grad]
        rows = _through(params, wanted_rows, weights, how.together) * training.count()
        total = rows if total is None else total + rows
    assert total is not None
    return total, losses


def _gradients(losses: Tensor, params: list[Tensor]) -> list[Tensor]:
    """For each parameter the gradients of all losses, along dimension 0; by one way back a loss, which is short."""
    found = [torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True) for loss in losses]
    return [
        torch.stack([torch.zeros_like(p) if row[place] is None else row[place] for row in found])
        for place, p in enumerate(params)
    ]


def _through(params: list[Tensor], rows: list[Tensor], weights: Tensor, together: int) -> Tensor:
    """Gradients of parameters after a training → of the weights in it, some at a time."""
    count, found = len(rows[0]), []
    for begin in range(0, count, together):
        end = min(begin + together, count)
        given, many = [own[begin:end] for own in rows], end - begin > 1
        if not many:
            given = [own[0] for own in given]
        (grad,) = torch.autograd.grad(params, weights, given, is_grads_batched=many, retain_graph=end < count)
        found.append(grad if many else grad[None])
    return torch.cat(found).detach()
