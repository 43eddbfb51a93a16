"""One inner loop on all ranks of a process group: each has a part of each batch, and all have the same parameters.

The loop runs as it does on one worker, but for three things: the gradient of each step is the mean over the ranks, what
``meta`` lists is replaced by tensors whose gradients are averaged, and so are the gradients of the loop's results.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.collectives.team import Team
from torchopt_dist.diff.adjoints import Adjoint, FirstOrder, Recorded, Replayed, Reptile, Truncated
from torchopt_dist.diff.adjoints._agreement import agreed
from torchopt_dist.diff.adjoints._declared import tensors_of_meta, tensors_within
from torchopt_dist.diff.adjoints._loop import Loop, Outcome
from torchopt_dist.diff.adjoints._model import Model
from torchopt_dist.diff.adjoints._rank_group import RankGroup, group_for_loops
from torchopt_dist.diff.adjoints._ranks import Ranks, local, mean, owned
from torchopt_dist.diff.adjoints._shards import ShardedModel, check_elementwise
from torchopt_dist.torch_private import transforms_are_active
from torchopt_dist.transform.base import GradientTransformation

__all__ = ["DataParallel", "mean_over", "run_together", "sum_over", "vary_over"]


@dataclass(frozen=True)
class DataParallel:
    """One inner loop on all ranks of a process group, for ``inner_loop(..., parallel=...)``.

    Each rank calls ``inner_loop`` with its own part of each batch, and a loss that is the mean over that part. All have
    the same parameters, optimizer and steps. The loop is that of the mean loss of all ranks; its losses and results are
    the same on all. The outer loss is taken to be the mean over the ranks, too, so each evaluates its part of it, and
    every rank gets the gradient of the mean. Random numbers of steps differ from rank to rank; their seed is that of
    the first rank. Buffers, such as running means, are each rank's own.

    Each step sends one message forward and one backward, of the parameters' size; the gradients of what ``meta`` lists
    are averaged once, at the end of the backward pass. All ranks have to run the loop, and its backward pass. ``stop``
    ends the loop of all when it is true on one.

    If a rank raises an error in the loop or in the backward pass of its steps, or dies, the others get an error at
    once; if it is stopped or cannot be reached, after the patience of :class:`~torchopt_dist.Liveness` in the variable
    ``TODIST_LIVENESS``. A rank that lives and does not come to a loop, or to its backward pass, may just be late: a
    ``RuntimeWarning`` names it after the patience, and the others get an error after the time-out of the process group,
    which is the ``timeout`` of ``init_process_group`` or ``new_group``.

    Args:
        group: a process group, a ``DeviceMesh`` of one dimension, or a :func:`~torchopt_dist.team`; the default group,
            if not given. Loops run in a group of their own with the same ranks, so that other messages do not mix in.
        own: a tree of those tensors of ``meta`` that are this rank's alone, such as weights of its own examples: their
            gradients are not averaged. Those of batches always are this rank's alone. All others are replicated, and
            their gradients are the same on all ranks.
        shard: ``"state"``: each rank has a part of the optimizer's state, of the history, and of what a backward pass
            keeps, and the parameters are whole on it only while a loss is evaluated. The result's state is a part, too.
            The optimizer must move each element by itself, and the adjoint be :class:`~torchopt_dist.Recorded`,
            :class:`~torchopt_dist.Replayed` without ``blocks``, :class:`~torchopt_dist.Truncated`,
            :class:`~torchopt_dist.FirstOrder` or :class:`~torchopt_dist.Reptile`. ``"parameters"``, with
            ``Replayed(blocks=...)``: the parameters of a block are whole only while it is called, so a loss must not
            use them in another way.

    Raises:
        TypeError: ``group`` is neither of these.
        RuntimeError: there is no process group.
        ValueError: the mesh has more than one dimension; ``shard`` is neither of these; or, from ``inner_loop``: the
            ranks have different parameters, meta tensors, steps or optimizers; ``own`` has a tensor that is not in
            ``meta``, or that the optimizer uses; with ``shard``, the optimizer or the adjoint is another one,
            ``meta`` has a tensor of the optimizer, or the loss uses a parameter of a block outside of it.
        CollectiveError: from ``inner_loop`` and from the backward pass: a rank has died, was stopped, has raised an
            error, whose text is in the message, or has not come within the time-out of the process group.

    Example:
        >>> adapted = todist.inner_loop(  # doctest: +SKIP
        ...     loss, todist.adam(lr=lr), model, batches, meta=weights, parallel=todist.DataParallel(own=weights)
        ... )
    """

    group: Any = None
    own: Any = ()
    shard: Literal["state", "parameters"] | None = None

    def __post_init__(self) -> None:
        _check_group(self.group)
        if self.shard not in (None, "state", "parameters"):
            raise ValueError(f"`shard` must be 'state', 'parameters' or None, got {self.shard!r}")

    @property
    def ranks(self) -> RankGroup:
        """The group in which its loops run; all ranks have to ask for it."""
        return _group_of(self.group)

    def parted(self, model: Model, optimizer: GradientTransformation, adjoint: Adjoint) -> Model:
        """The model of the loop, in parts where it is to be."""
        if self.shard is None:
            return model
        if transforms_are_active():
            raise ValueError("`shard` of DataParallel must be None inside of torch.func's transforms")
        if not isinstance(adjoint, (Recorded, Replayed, Truncated, FirstOrder, Reptile)):
            raise ValueError(
                "`shard` of DataParallel must be None with an adjoint that takes products of all parameters, got "
                f"todist.{type(adjoint).__name__}"
            )
        blocks = adjoint.blocks if isinstance(adjoint, Replayed) else None
        if (self.shard == "parameters") != (blocks is not None):
            raise ValueError(
                "`shard` of DataParallel must be 'parameters' with `blocks` of todist.Replayed, and 'state' without: "
                "parameters are gathered block by block, or all together"
            )
        if isinstance(adjoint, Replayed) and adjoint.sharded:
            raise ValueError(
                "`sharded` of todist.Replayed must be False with `shard` of DataParallel, with which all that it keeps "
                "is in parts already"
            )
        check_elementwise(optimizer)
        moved = tuple(model.leaves[place] for place in model.moved_places)
        return ShardedModel(model, Ranks(self.ranks, moved=moved), by_block=blocks is not None)

    def spread(self, loop: Loop, adjoint: Adjoint, meta: Any) -> Loop:
        """The loop as each rank runs it."""
        own = {id(tensor) for tensor in tensors_of_meta(self.own)}
        listed = {id(tensor) for tensor in tensors_of_meta(meta)}
        in_optimizer = {id(tensor) for tensor in tensors_within(loop.optimizer)}
        if own - listed:
            raise ValueError(
                "`own` of DataParallel must be of tensors that `meta` lists, got "
                f"{len(own - listed)} that it does not list"
            )
        if own & in_optimizer:
            raise ValueError(
                "`own` of DataParallel must not have tensors that the optimizer uses: it would move the parameters "
                "differently on each rank"
            )
        if self.shard is not None and in_optimizer & listed:
            raise ValueError(
                "`meta` must not list tensors of the optimizer with `shard` of DataParallel: they are found there, and "
                "a loss may not use them as well"
            )
        places = frozenset(
            place
            for place, tensor in enumerate(loop.declared)
            if id(tensor) in own or id(tensor) not in listed | in_optimizer
        )
        moved = tuple(loop.first.params[place] for place in loop.model.moved_places)
        ranks = Ranks(self.ranks, places, moved, shards=self.shard is not None)
        seed = agreed(ranks, loop, adjoint)
        return replace(loop, ranks=ranks, seed=(seed + ranks.rank * 0xD1342543DE82EF95) % 2**63)


def run_together(loop: Loop, adjoint: Adjoint) -> Outcome:
    """Run a loop that is spread over ranks, and connect what it makes on all of them."""
    ranks = loop.ranks
    assert ranks is not None
    inside = list(loop.declared)
    in_optimizer = {id(tensor) for tensor in tensors_within(loop.optimizer)}
    # With parts of parameters, each rank has a part of what a tensor of the optimizer does.
    parts = [place for place, one in enumerate(loop.declared) if ranks.shards and id(one) in in_optimizer]
    replicated = [place for place in range(len(inside)) if place not in ranks.own and place not in parts]
    summed = Ranks(ranks.group, sums=True)
    for places, function, among in (
        (replicated, local, ranks),
        (parts, local, summed),
        (sorted(ranks.own), owned, ranks),
    ):
        made = function(among, [inside[place] for place in places])
        for place, tensor in zip(places, made, strict=True):
            inside[place] = tensor
    if isinstance(adjoint, Replayed) and not transforms_are_active():  # which runs the steps without a graph
        outcome = adjoint.run(replace(loop, joined=tuple(inside)))
    else:
        with loop.instead_of_declared(inside):
            outcome = adjoint.run(loop)
    places = loop.model.moved_places
    params = list(outcome.carry.params)
    leaves, spec = pytree.flatten(outcome.carry.state)
    of_state = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    losses = list(outcome.losses)
    if ranks.shards:  # which are gathered for the result
        return outcome._replace(losses=local(ranks, losses))
    outputs = [*(params[place] for place in places), *(leaves[place] for place in of_state), *losses]
    made = local(Ranks(ranks.group, moved=outputs, asks_again=True), outputs, are_params=True)
    for place, tensor in zip(places, made, strict=False):
        params[place] = tensor
    for place, tensor in zip(of_state, made[len(places) :], strict=False):
        leaves[place] = tensor
    tied = [params[place] for place in loop.model.first_places]
    carry = outcome.carry._replace(params=tied, state=pytree.unflatten(spec, leaves))
    return outcome._replace(carry=carry, losses=made[len(places) + len(of_state) :])


def vary_over(tree: Any, group: Any = None, *, reduction: Literal["mean", "sum"] = "mean") -> Any:
    """Replicated → local: the same values on each rank, whose gradients are averaged over the ranks, or summed.

    For a tensor that is the same on all ranks, and that each uses in its part of a computation whose result is the mean
    over the ranks, or the sum. Its gradient is the same on all ranks. It is the transpose of :func:`mean_over`, or of
    :func:`sum_over`, has derivatives of every order, and runs inside ``torch.func``'s transforms. All ranks have to
    call it, and its backward.

    Args:
        tree: a tree of tensors, the same on all ranks.
        group: as for :class:`DataParallel`.
        reduction: ``"mean"`` where :func:`mean_over` comes later, ``"sum"`` where :func:`sum_over` does.

    Returns:
        A tree of the same structure and values.

    Raises:
        ValueError: ``reduction`` is neither of these.
        CollectiveError: in the backward pass: a rank has died, or has raised an error.

    Example:
        >>> scale = todist.vary_over(scale)  # doctest: +SKIP
        >>> loss = todist.mean_over(((scale * x_of_this_rank - y_of_this_rank) ** 2).mean())  # doctest: +SKIP
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"`reduction` must be 'mean' or 'sum', got {reduction!r}")
    return _mapped(local, tree, group, sums=reduction == "sum")


def mean_over(tree: Any, group: Any = None) -> Any:
    """Local → replicated: the mean over the ranks, whose gradient passes to each rank unchanged.

    It is the transpose of :func:`vary_over`, where a gradient is the same on all ranks, has derivatives of every order,
    and runs inside ``torch.func``'s transforms. All ranks have to call it with the same shapes.

    Args:
        tree: a tree of tensors, one on each rank.
        group: as for :class:`DataParallel`.

    Returns:
        A tree of the same structure, the same on all ranks.

    Raises:
        CollectiveError: a rank has died, or has raised an error.
    """
    return _mapped(mean, tree, group)


def sum_over(tree: Any, group: Any = None) -> Any:
    """Local → replicated: the sum over the ranks, whose gradient passes to each rank unchanged.

    It is the transpose of ``vary_over(..., reduction="sum")``, where a gradient is the same on all ranks, and has
    derivatives as :func:`mean_over`. The two are Megatron's *g* and *f*, by which the layers of a model are split over
    ranks (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053, section 3).

    Args:
        tree: a tree of tensors, one on each rank.
        group: as for :class:`DataParallel`.

    Returns:
        A tree of the same structure, the same on all ranks.

    Raises:
        CollectiveError: a rank has died, or has raised an error.

    Example:
        >>> x = todist.vary_over(x, reduction="sum")  # doctest: +SKIP
        >>> y = todist.sum_over(torch.tanh(x @ columns_of_this_rank) @ rows_of_this_rank)  # doctest: +SKIP
    """
    return _mapped(mean, tree, group, sums=True)


def _mapped(function: Any, tree: Any, group: Any, *, sums: bool = False) -> Any:
    leaves, spec = pytree.flatten(tree)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    _check_group(group)
    made = function(Ranks(_group_of(group), sums=sums), [leaves[place] for place in places])
    for place, tensor in zip(places, made, strict=True):
        leaves[place] = tensor
    return pytree.unflatten(spec, leaves)


_groups: weakref.WeakKeyDictionary[Any, tuple[RankGroup | None, int]] = weakref.WeakKeyDictionary()
"""For each group of the caller's the one in which its ranks run loops, so that other uses of it do not mix in; and how
many such groups there were."""


def _check_group(group: Any) -> None:
    if isinstance(group, Team):
        return
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "todist.DataParallel needs a process group: start the program with todist.launch(..., backend='gloo'), use "
            "todist.auto_init_rpc(process_group='gloo'), or call torch.distributed.init_process_group"
        )
    if isinstance(group, dist.device_mesh.DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"`group` must be a DeviceMesh of one dimension, got {group.ndim}: take one by its name, as in "
                "mesh['data']"
            )
    elif group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"`group` must be a process group, a DeviceMesh or None, got {type(group).__name__}")


def _group_of(group: Any) -> RankGroup:
    if isinstance(group, Team):
        return RankGroup(group.group)
    if isinstance(group, dist.device_mesh.DeviceMesh):
        group = group.get_group()
    group = dist.group.WORLD if group is None else group
    known, number = _groups.get(group, (None, 0))
    if known is None or not known.is_open:  # an error closes it on all ranks
        _groups[group] = None, number + 1
        known = group_for_loops(group, number)
        _groups[group] = known, number + 1
    return known
