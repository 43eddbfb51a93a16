"""Work in several threads on a leaf that has no gradient accumulator yet: unless one is held, they deadlock."""

from __future__ import annotations

import sys
import threading

import torch

import torchopt_dist as todist
from tests.distributed.programs import cube


def remote_cube(x):
    return todist.remote_sync_call(cube, args=(x,), partitioner=1)[0]


class _Cubed(torch.autograd.Function):
    """Applied with Python's global lock held, as those of remote calls are."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.detach() ** 3

    @staticmethod
    def backward(ctx, grad):
        return 3 * ctx.saved_tensors[0] ** 2 * grad


def _at_the_same_time(leaves, *functions):
    """Each function on each of the leaves, in threads that begin a leaf together; whether they came to an end."""
    begun = [0] * len(functions)

    def work(number, function):
        for index, leaf in enumerate(leaves, start=1):
            begun[number] = index
            while min(begun) < index:
                pass
            function(leaf)

    threads = [threading.Thread(target=work, args=item, daemon=True) for item in enumerate(functions)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # a thread that wants the global lock gets it at the next chance
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
    finally:
        sys.setswitchinterval(interval)
    return not any(thread.is_alive() for thread in threads)


def test_calls_do_not_lock_up_with_other_work_on_a_leaf(world):
    def body():
        leaves = [torch.ones(3, requires_grad=True) for _ in range(300)]
        return _at_the_same_time(leaves, lambda x: x**2, remote_cube, remote_cube)

    assert world(2).on_zero(body)


def test_an_own_share_in_a_thread_does_not_lock_up_with_other_work_on_a_leaf(world):
    def body():
        begun = []

        def share(x):
            begun.append(x)
            return x**2

        sys.setswitchinterval(1e-6)
        for index in range(3000):
            leaf = torch.ones(3, requires_grad=True)
            future = todist.remote_async_call(share, args=(leaf,), partitioner=0, isolate_own_share=False)
            while len(begun) == index:
                pass
            _Cubed.apply(leaf)
            future.wait()

    world(1).on_zero(body)
