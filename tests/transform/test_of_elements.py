"""What is declared of each link about the elements of tensors → what it does to a part of them, and to one vector."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

import torch

import torchopt_dist as todist
from tests.diff.data_parallel_faults import WHOLE
from tests.rows import each_row
from torchopt_dist import pytree, transform
from torchopt_dist.transform.base import is_of_elements, link_of_whole

PLAIN = {
    **{
        name: getattr(todist, name)(lr=0.1)
        for name in [
            "sgd",
            "adam",
            "adamw",
            "adamax",
            "radam",
            "rmsprop",
            "adagrad",
            "adadelta",
            "adan",
            "lion",
        ]
    },
    "momentum": todist.sgd(lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.1, nesterov=False),
    "scheduled": todist.adam(lr=todist.schedule.linear_schedule(0.1, 0.0, 3)),
    "clipped by value": todist.chain(transform.clip_grad_value(0.3), todist.sgd(lr=0.1)),
    "without NaN": todist.chain(transform.nan_to_num(), todist.sgd(lr=0.1)),
    "averaged": todist.chain(todist.adam(lr=0.1), transform.average_params(0.9)),
    "smoothed": todist.chain(transform.ema(0.9), todist.sgd(lr=0.1)),
    "lookahead": transform.lookahead(todist.adam(lr=0.1), 2),
    "every second": transform.multi_steps(todist.adam(lr=0.1), 2),
    "schedule-free": transform.schedule_free(todist.sgd(lr=0.1)),
    "masked": transform.masked(todist.adam(lr=0.1), [True, False]),
    "partition": transform.partition({"a": todist.sgd(0.1), "b": todist.adam(0.1)}, ["a", "b"]),
    "rates by leaf": todist.sgd(lr=[0.1, torch.tensor(0.2)]),
    "injected": transform.inject_hyperparams(todist.adam)(lr=lambda step: 0.1 / (step + 1)),
}
NORMS = {"clipped": todist.chain(transform.clip_grad_norm(1.0), todist.sgd(lr=0.1))}
SHAPES = [(3, 2), (4,)]


def moved(impl, params, grads):
    state, found = impl.init(params), []
    for these in grads:
        updates, state = impl.update(these, state, params=params)
        params = [p if u is None else p + u for p, u in zip(params, updates, strict=True)]
        found.append(params)
    return found


def drawn(sizes=(1.0, 1e-3, 1e3, 0.0, 1.0)):
    generator = torch.Generator().manual_seed(0)
    params, *grads = (
        [size * torch.randn(shape, generator=generator).double() for shape in SHAPES] for size in (1, *sizes)
    )
    return params, grads


def part(tensors):
    return [tensor.reshape(-1)[1:4].clone() for tensor in tensors]


@each_row("name", PLAIN)
def test_what_is_declared_moves_a_part_as_the_whole(name):
    impl = PLAIN[name]
    assert link_of_whole(impl) is None
    params, grads = drawn()
    of_part = moved(impl, part(params), [part(these) for these in grads])
    for whole, of_these in zip(moved(impl, params, grads), of_part, strict=True):
        torch.testing.assert_close(part(whole), of_these)


@each_row("name", [name for name, impl in {**PLAIN, **NORMS}.items() if is_of_elements(impl)])
def test_what_is_declared_moves_one_vector_as_the_tensors(name):
    impl = {**PLAIN, **NORMS}[name]
    params, grads = drawn()

    def flat(tensors):
        return [torch.cat([tensor.reshape(-1) for tensor in tensors])]

    of_vector = moved(impl, flat(params), [flat(these) for these in grads])
    for whole, of_these in zip(moved(impl, params, grads), of_vector, strict=True):
        torch.testing.assert_close(flat(whole), of_these)


@each_row("name", [*WHOLE, *NORMS])
def test_what_needs_whole_tensors_is_not_declared(name):
    assert link_of_whole({**WHOLE, **NORMS}[name]) is not None
    assert name in NORMS or not is_of_elements(WHOLE[name])


def by_dimensions(least, params):
    return pytree.map_tensors(lambda p: p.ndim >= least, params)


class ByDimensions:
    def __call__(self, params):
        return by_dimensions(2, params)


@each_row("mask", [partial(by_dimensions, 2), ByDimensions(), lambda p: by_dimensions(2, p)])
def test_a_mask_that_is_called_is_one_of_shapes_whatever_it_is(mask):
    for link in (transform.add_decayed_weights(0.1, mask), transform.masked(todist.sgd(0.1), mask)):
        assert link_of_whole(link) is not None
        assert not is_of_elements(link)


def test_a_link_of_ones_own_is_declared():
    @transform.of_elements()
    def signs(updates, state, *, params=None, inplace=False):
        return pytree.map_tensors(torch.sign, updates), state

    def squares(updates, state, *, params=None, inplace=False):
        return pytree.map_tensors(torch.square, updates), state

    own, other = (
        transform.chain(transform.GradientTransformation(transform.identity().init, update), todist.sgd(0.1))
        for update in (signs, squares)
    )
    assert (link_of_whole(own), is_of_elements(own)) == (None, True)
    assert "squares" in link_of_whole(other)
    assert not is_of_elements(other)


@each_row("kind", [dict, OrderedDict, torch.nn.ParameterDict])
def test_a_rate_for_each_parameter_is_one_whatever_the_mapping_is(kind):
    rates = kind({"w": torch.full((2, 2), 0.5), "b": torch.full((2,), 0.1)})
    for link in (transform.scale_by_learning_rate(rates), transform.add_decayed_weights(rates)):
        assert link_of_whole(link) is not None
        assert not is_of_elements(link)


def test_an_argument_of_an_unknown_kind_may_be_one_for_each_parameter():
    class Rates:
        values = (0.1, 0.2)

    @transform.of_elements()
    def scaled(_rates, updates, state, *, params=None, inplace=False):
        return updates, state

    for rates, is_known in (
        (Rates(), False),
        (torch.tensor([[0.1]]), False),
        (torch.tensor(0.1), True),
        (0.1, True),
    ):
        link = transform.GradientTransformation(transform.identity().init, partial(scaled, rates))
        assert is_of_elements(link) is is_known
