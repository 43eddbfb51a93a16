"""A tree has the shape that is done soonest, enters a machine once, and is made where it is asked for or pays."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import torchopt_dist as todist
from tests.distributed.programs import edges
from tests.rows import each_row
from torchopt_dist.distributed.calls.tree import fan_out_for, tree
from torchopt_dist.distributed.messages.payload import ExecutionOptions, group_by_worker


@each_row("fan_out", [1, 2, 3, 8])
@each_row("machines", [1, 3, 16])
def test_each_worker_has_one_parent_and_few_children_and_a_machine_is_entered_once(fan_out, machines):
    for size in (2, 3, 9, 33):
        hosts = [f"host{rank % machines}" for rank in range(size)]
        found = list(edges(tree(0, range(1, size), hosts, fan_out)))
        assert sorted(child for _, child in found) == list(range(1, size))
        parents = [parent for parent, _ in found]
        assert max(map(parents.count, parents)) <= fan_out
        entered = [hosts[child] for parent, child in found if hosts[parent] != hosts[child]]
        assert sorted(entered) == sorted({*hosts} - {hosts[0]})


def test_a_tree_is_done_after_as_many_rounds_as_its_workers_allow():
    """With three children those that have it after a round are 1 + the sum of the three rounds before."""

    def rounds(twigs, start=0):
        return max((rounds(twig.twigs, start + nth) for nth, twig in enumerate(twigs, 1)), default=start)

    reached = [1, 2, 4]
    while reached[-1] < 1024:
        reached.append(1 + sum(reached[-3:]))
    for after, size in enumerate(reached):
        assert rounds(tree(0, range(1, size), ["host"] * size, 3)) == after
    assert rounds(tree(0, range(1, 1024), ["host"] * 1024, 1024)) == 10


@each_row("fan_out", [0, -1, True, 2.0, "all"])
def test_a_fan_out_that_is_no_number_of_workers_is_an_error(fan_out):
    with pytest.raises(ValueError, match="fan_out must be a whole number of workers, 1 or more"):
        todist.parallelize(fan_out=fan_out)
    with pytest.raises(ValueError, match="hedge_after=1 starts single shares again, and fan_out=2"):
        todist.parallelize(fan_out=2, hedge_after=1)


@each_row(
    ("options", "lost", "chosen"),
    [
        ({}, (), 3),
        ({"size": 8, "far": 3}, (), 0),  # three on another machine
        ({"size": 8, "far": 4}, (), 3),
        ({"size": 8, "far": 4}, (7,), 0),
        ({"nbytes": 1 << 19}, (), 0),
        ({"nbytes": 1 << 22}, (), 2),
        ({"fan_out": None}, (), 0),
        ({"fan_out": 2, "far": 0, "nbytes": 4}, (), 2),
        ({"fan_out": 5}, (), 0),  # all are children of the caller anyway
        ({"fan_out": 2, "retries": 1}, (1,), 2),
        ({"retries": 1}, (), 0),
        ({"hedge_after": 1.0}, (), 0),
    ],
)
def test_a_tree_is_made_where_it_is_asked_for_or_pays(options, lost, chosen):
    size, far, nbytes = (
        options.pop(key, usual) for key, usual in (("size", 6), ("far", 5), ("nbytes", 1 << 20))
    )
    members = [SimpleNamespace(host="far" if rank >= size - far else "here") for rank in range(size)]
    membership = SimpleNamespace(failures=lost)
    shared = torch.zeros(nbytes, dtype=torch.uint8)
    payloads = group_by_worker(
        print,
        [(rank, (shared, torch.ones(1 << 18)), {}) for rank in range(1, size)],
        ExecutionOptions(**options),
    )
    group = SimpleNamespace(rank=0, members=members, membership=membership)
    found = fan_out_for(group, {rank: payload for rank, (payload, _) in payloads.items()})
    assert found == chosen
