"""All state of an RPC group hangs on the group: when it has ended nothing is left, and a second one starts afresh."""

from __future__ import annotations

import collections
import functools
import gc
import importlib
import os
import pkgutil
import queue
import sys
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch

import torchopt_dist as todist
from tests.distributed.programs import mlp, rank_of_worker
from tests.processes import World
from torchopt_dist import distributed
from torchopt_dist.distributed.group import group as group_module
from torchopt_dist.distributed.group.group import current_group

STATE = (
    *(list, dict, set, collections.deque, collections.OrderedDict, weakref.WeakValueDictionary),
    *(queue.SimpleQueue, queue.Queue, threading.Thread, threading.Event, type(threading.Lock())),
)
MAY_HOLD = {"rendezvous.store._stores", "transport.rpc._answering"}
"""What passes torch's RPC, which finds functions alone, a store while it starts, and its requests a transport."""


def modules():
    for info in pkgutil.walk_packages(distributed.__path__, f"{distributed.__name__}."):
        yield importlib.import_module(info.name)


@pytest.mark.torch_rpc
def test_modules_hold_no_state():
    found = []
    for module in modules():
        place = module.__name__.removeprefix(f"{distributed.__name__}.")
        for name, value in vars(module).items():
            own = type(value).__module__.startswith(distributed.__name__) and not isinstance(value, type)
            if (isinstance(value, STATE) or own) and not name.startswith("__"):
                found.append(f"{place}.{name}")
    partitioners = {"partition.batch_partitioner", "partition.tasks"}
    assert {name for name in found if not name.startswith("partition.")} <= MAY_HOLD
    assert partitioners <= set(found), "a function's settings are found, so state would be"


def use_all_of_it():
    """Calls that leave something in every part of a group: kept graphs, a releaser, threads."""
    other, model = 1 - todist.get_rank(), mlp()
    todist.barrier()  # a task of the other rank seeds the generator that the model is drawn from
    x = torch.ones(4, model[0].in_features, dtype=model[0].weight.dtype, requires_grad=True)

    def loss(model, x):
        return model(x).square().sum()

    (value,) = todist.remote_sync_call(loss, args=(model, x), partitioner=other)
    (later,) = todist.remote_async_call(loss, args=(model, x), partitioner=other).wait()
    (value + later).backward()
    (unused,) = todist.remote_sync_call(loss, args=(model, x), partitioner=other)
    return x.grad, unused


def ended(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.002)
    return condition()


def ours():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("todist-")]


def test_a_group_is_forgotten_when_it_has_ended():
    def main():
        gradient, _ = use_all_of_it()
        todist.barrier()
        return gradient, weakref.ref(current_group()), weakref.ref(current_group().transport)

    def program():
        gradients = []
        for _ in range(2):
            torch.manual_seed(0)
            gradient, *references = todist.auto_init_rpc()(main)()
            gradients.append(gradient)
            assert group_module._group is None
            assert ended(lambda: not ours()), ours()
            assert ended(lambda references=references: not any(each() for each in references))
        return torch.equal(*gradients)

    assert World(2, rpc=False).run(program) == [True, True]


def test_a_second_group_knows_nothing_of_the_first():
    def main(first):
        group = current_group()
        assert group is not first
        assert len(group.kept_graphs) == 0
        number = next(group.numbers)
        todist.barrier()
        _, unused = use_all_of_it()
        todist.barrier()
        kept = len(group.kept_graphs)
        todist.barrier()
        return group, number, kept, unused

    def program():
        first, *of_first, unused = todist.auto_init_rpc(worker_name_format="first{world_rank}".format)(main)(
            None
        )
        second, *of_second, _ = todist.auto_init_rpc(worker_name_format="second{world_rank}".format)(main)(
            first
        )
        assert of_first == of_second == [0, 1]
        assert (len(first.kept_graphs), len(second.kept_graphs)) == (0, 0)
        del unused  # its graph was in the first group: nobody is asked to release it
        return first.names, second.names

    names = ("first0", "first1"), ("second0", "second1")
    assert World(2, rpc=False).run(program) == [names, names]


@pytest.mark.parametrize("again", [False, True])
def test_a_backward_after_the_group_has_ended_is_an_error_that_says_so(again):
    def main():
        _, unused = use_all_of_it()
        todist.barrier()
        return unused

    def program():
        unused = todist.auto_init_rpc()(main)()

        def differentiate():
            with pytest.raises(
                todist.errors.NotInitializedError, match=r"kept by worker[01], and .* group has ended"
            ):
                unused.backward()

        (todist.auto_init_rpc()(differentiate) if again else differentiate)()
        return True

    assert World(2, rpc=False).run(program) == [True, True]


def test_the_end_waits_for_the_threads_only_as_long_as_the_releaser_has_left_of_its_time():
    def program():
        group = todist.auto_init_rpc()(current_group)()
        now, waited = [100.0], []
        group_module.time = SimpleNamespace(monotonic=lambda: now[0])
        group.threads.close = waited.append
        for takes in (2.0, 7.0):

            def release(seconds, takes=takes):
                now[0] += takes
                waited.append(seconds)

            group.releaser.close = release
            group.close(5.0)
        return waited

    assert World(1, rpc=False).run(program) == [[5.0, 3.0, 5.0, 0.0]]


def test_a_world_of_one_leaves_nothing_either():
    def main():
        group = current_group()
        assert todist.remote_async_call(rank_of_worker, partitioner=0).wait() == [0]
        return weakref.ref(group)

    def program():
        for _ in range(2):
            reference = todist.auto_init_rpc()(main)()
            assert group_module._group is None
            assert ended(lambda reference=reference: reference() is None and not ours()), ours()
        with pytest.raises(todist.errors.NotInitializedError, match="no RPC group"):
            todist.remote_sync_call(rank_of_worker, partitioner=0)
        return todist.get_world_info().worker_name

    assert World(1, rpc=False).run(program) == ["worker0"]


def error_of(function, *args, **options):
    try:
        function(*args, **options)
    except todist.errors.NotInitializedError as error:
        return str(error)


@pytest.mark.parametrize("transport", ["rpc", "zmq"])
def test_a_fork_of_a_worker_is_not_in_the_group_and_leaves_main_without_ending_it(transport):
    def main():
        if todist.get_rank() == 1:
            return None
        x = torch.ones(2, requires_grad=True)
        call = functools.partial(todist.remote_sync_call, torch.dot, args=(x, x), partitioner=1)
        (out,) = call()
        receiver, sender = os.pipe()
        child = os.fork()
        if child == 0:
            errors = [error_of(each) for each in (call, out.backward, todist.barrier, todist.status)]
            os.write(sender, repr(errors).encode())
            sys.exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        out.backward()
        call()
        return os.read(receiver, 10_000).decode()

    def program():
        try:
            return todist.auto_init_rpc(transport=transport)(main)()
        except SystemExit as end:  # the child, which has no more to do with the test
            os._exit(end.code)

    endings = World(2, rpc=False).endings(program, timeout=200)
    assert [ending.error for ending in endings] == [None, None], endings
    assert endings[0].value.count("this process is a fork of worker0, and does not have its connections") == 4
