"""A decorator without parentheses is one with its defaults; a function that is its argument stays that."""

from __future__ import annotations

import functools
import gc
import weakref

import pytest
import torch

import torchopt_dist as todist

DECORATORS = {
    "todist.parallelize": todist.parallelize,
    "todist.parallelize_async": todist.parallelize_async,
    "todist.auto_init_rpc": todist.auto_init_rpc,
}


def logged(function):
    @functools.wraps(function)
    def wrapped(*args):
        return function(*args)

    return wrapped


def test_without_parentheses_it_has_its_defaults(world):
    def body():
        names = {"todist": todist}
        exec("@todist.parallelize\ndef loss(x):\n    return x.sum()", names)
        assert [part.item() for part in names["loss"](torch.arange(5.0))] == [10.0]

        @todist.parallelize_async
        @logged
        def later(
            x,
            y=2,
        ):
            return x.sum() * y

        assert [part.item() for part in later(torch.arange(5.0)).wait()] == [20.0]

        class Trainer:
            @todist.parallelize
            def loss(self, x):
                return x.sum()

        assert [part.item() for part in Trainer().loss(torch.arange(5.0))] == [10.0]

    world(1).on_zero(body)

    @todist.auto_init_rpc
    def main(x):
        """Of a program."""
        return todist.get_world_size(), x

    assert main(3) == (1, 3)
    assert main.__doc__ == "Of a program."


@todist.auto_init_rpc()
def evens(x):
    """A partitioner that is decorated itself."""
    return [(0, (x[::2],), {})]


def odds(shift):
    def partitioner(x):
        return [(0, (x[1::2] + shift,), {})]

    return partitioner


def test_a_function_as_the_first_argument_is_taken(world):
    def all_of_it(x):
        return [(0, (x,), {})]

    def body():
        for partitioner, size in (
            (evens, 3),
            (odds(1), 2),
            (all_of_it, 5),
            (lambda x: [(0, (x[:1],), {})], 1),
        ):

            @todist.parallelize(partitioner)
            def count(x):
                return len(x)

            assert count(torch.arange(5)) == [size]
            # In one line with a function, as a call.
            assert todist.parallelize(partitioner)(len)(torch.arange(5)) == [size]
        assert todist.parallelize(lambda x: [(0, (x,), {})])(len)(torch.arange(5)) == [5]

    world(1).on_zero(body)


@pytest.mark.parametrize("name", DECORATORS)
def test_what_a_function_that_decorates_holds_is_freed_at_its_end(name):
    def decorating():
        held = torch.ones(3)
        decorated = DECORATORS[name](odds(1))(logged(torch.sin))
        assert callable(decorated)
        return weakref.ref(held)

    def running():
        held = torch.ones(3)
        todist.auto_init_rpc()(held.sum)()
        return weakref.ref(held)

    gc.collect()
    gc.disable()
    try:
        assert decorating()() is None
        assert running()() is None
    finally:
        gc.enable()
