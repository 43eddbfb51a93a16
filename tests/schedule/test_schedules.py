"""What holds of every schedule; a new one is a row in ``rows.py``."""

from __future__ import annotations

import copy
import functools
import math
import pickle

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, jacrev, vmap

import torchopt_dist as todist
from tests.rows import each_row
from tests.schedule.rows import ROWS, every_row
from torchopt_dist.schedule import exponential_decay, join_schedules, linear_schedule, polynomial_schedule


def tensors(row, **kwargs):
    return {name: torch.tensor(value, dtype=torch.float64, **kwargs) for name, value in row.values.items()}


def derivatives(value, inputs):
    """First and second derivatives with respect to each, of those that there are."""
    first = torch.autograd.grad(value, inputs, create_graph=True, materialize_grads=True)
    second = []
    for one in first:
        if one.requires_grad:
            second += torch.autograd.grad(one, inputs, retain_graph=True, materialize_grads=True)
    return [*first, *second]


@every_row
def test_closed_form(row):
    schedule = row.make(**row.values)
    for count in row.counts:
        assert schedule(count) == pytest.approx(row.closed(count), rel=1e-12, abs=1e-15)


@every_row
def test_a_number_gives_a_number_and_a_tensor_a_tensor(row):
    schedule, learned = row.make(**row.values), row.make(**tensors(row))
    for count in row.counts:
        value = schedule(count)
        assert type(value) is float
        of_tensor = schedule(torch.tensor(count, dtype=torch.float64))
        assert of_tensor.shape == ()
        assert of_tensor.dtype == torch.float64
        assert of_tensor.item() == pytest.approx(value, rel=1e-14, abs=1e-16)
        of_tensors = learned(torch.tensor(count, dtype=torch.float64))
        assert of_tensors.item() == pytest.approx(value, rel=1e-14, abs=1e-16)
        if row is not ROWS["joined"]:  # whose last part is a plain number
            assert isinstance(learned(count), torch.Tensor)
        assert float(learned(count)) == pytest.approx(value, rel=1e-14, abs=1e-16)


@every_row
def test_counts_of_any_shape_and_of_whole_numbers(row):
    whole = [count for count in row.counts if isinstance(count, int)]
    counts = torch.tensor(whole).reshape(1, -1)
    want = torch.tensor([[row.closed(count) for count in whole]])
    got = row.make(**row.values)(counts)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want)


@every_row
def test_values_of_one_element_of_any_shape(row):
    values = {name: value.reshape(1, 1) for name, value in tensors(row).items()}
    value = row.make(**values)(torch.tensor(1.0, dtype=torch.float64))
    assert value.shape == ()
    assert value.item() == pytest.approx(row.closed(1))


@every_row
def test_derivatives_with_respect_to_the_values(row):
    def at(count, *args):
        return row.make(**dict(zip(row.values, args, strict=True)))(count)

    for count in (torch.tensor(count, dtype=torch.float64) for count in row.counts):
        values = tensors(row, requires_grad=True)
        if not at(count, *values.values()).requires_grad:
            continue
        if count > 100 and row.values.get("decay_rate", 0) > 1:
            continue  # finite differences know no limit; see the test of finite derivatives
        of_values = functools.partial(at, count)
        assert gradcheck(of_values, tuple(values.values()))
        assert gradgradcheck(of_values, tuple(values.values()))


@every_row
def test_derivatives_are_finite_and_the_same_for_numbers_and_tensors(row):
    values = list(tensors(row, requires_grad=True).values())
    schedule = row.make(**dict(zip(row.values, values, strict=True)))
    for count in (*row.counts, 100_000):
        by_tensor = schedule(torch.tensor(count, dtype=torch.float64))
        by_number = schedule(count)
        found = derivatives(by_tensor, values)
        assert all(one.isfinite() for one in found)
        if isinstance(by_number, torch.Tensor):
            first = torch.autograd.grad(by_number, values, materialize_grads=True)
            torch.testing.assert_close(list(first), found[: len(values)])


@every_row
def test_derivatives_with_respect_to_the_count_are_finite(row):
    schedule = row.make(**row.values)
    for count in row.counts:
        at = torch.tensor(count, dtype=torch.float64, requires_grad=True)
        value = schedule(at)
        if value.requires_grad:
            assert all(one.isfinite() for one in derivatives(value, [at]))


@every_row
def test_vmap_over_counts_and_over_values(row):
    counts = torch.tensor(row.counts, dtype=torch.float64)
    schedule = row.make(**row.values)
    one_by_one = torch.stack([schedule(count) for count in counts])
    torch.testing.assert_close(vmap(schedule)(counts), one_by_one, rtol=1e-14, atol=0)
    torch.testing.assert_close(schedule(counts), one_by_one, rtol=1e-14, atol=0)

    def at_three(values):
        return row.make(**values)(torch.tensor(3.0, dtype=torch.float64))

    several = {name: torch.stack([value, value * 1.5]) for name, value in tensors(row).items()}
    each = [at_three({name: value[place] for name, value in several.items()}) for place in range(2)]
    torch.testing.assert_close(vmap(at_three)(several), torch.stack(each), rtol=1e-14, atol=0)


@every_row
def test_torch_func(row):
    for count in row.counts:

        def value(values):
            return row.make(**values)(torch.tensor(count, dtype=torch.float64))  # noqa: B023

        values = tensors(row, requires_grad=True)
        made = value(values)
        if not made.requires_grad:
            continue
        want = torch.autograd.grad(made, list(values.values()), materialize_grads=True)
        got = grad(value)(tensors(row))
        torch.testing.assert_close(list(got.values()), list(want))
        second = jacrev(jacrev(value))(tensors(row))
        assert all(one.isfinite() for line in second.values() for one in line.values())


@each_row("name", [name for name in ROWS if name != "joined"])
@each_row("again", [copy.deepcopy, lambda schedule: pickle.loads(pickle.dumps(schedule))])
def test_pickle_and_deepcopy(name, again):
    row = ROWS[name]
    schedule = again(row.make(**row.values))
    assert [schedule(count) for count in row.counts] == [row.make(**row.values)(c) for c in row.counts]
    learned = again(row.make(**tensors(row, requires_grad=True)))(row.counts[1])
    assert learned.requires_grad
    assert learned.item() == pytest.approx(row.closed(row.counts[1]))


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_traces_into_one_graph(row):
    torch.compiler.reset()  # all rows share the code that is compiled
    schedule = row.make(**row.values)
    compiled = torch.compile(lambda count: schedule(count), fullgraph=True, backend="eager")
    for count in row.counts:  # also: no guard on what is in the tensor
        tensor = torch.tensor(count, dtype=torch.float64)
        with torch.compiler.set_stance("default" if count == row.counts[0] else "fail_on_recompile"):
            torch.testing.assert_close(compiled(tensor), schedule(tensor), rtol=1e-14, atol=0)


def test_compiles_with_gradients():
    def value(init_value, decay_rate, end_value, count):
        return exponential_decay(init_value, decay_rate, end_value=end_value)(count)

    args = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (0.7, 2.0, 5.0)]
    compiled = torch.compile(value, fullgraph=True, backend="aot_eager")
    for count in (torch.tensor(c, dtype=torch.float64) for c in (1.0, 5000.0)):
        got = torch.autograd.grad(compiled(*args, count), args)
        torch.testing.assert_close(got, torch.autograd.grad(value(*args, count), args))


def test_the_borders_are_exact():
    schedule = linear_schedule(0.1, 0.7, 10, 5)  # (0.1 - 0.7) + 0.7 is not 0.1
    assert (schedule(0), schedule(5), schedule(15)) == (0.1, 0.1, 0.7)


def test_a_power_of_zero_is_no_transition_for_numbers_and_tensors():
    for power in (0, torch.tensor(0.0)):
        assert float(polynomial_schedule(1.0, 0.0, power, 4)(4)) == 1.0
        assert polynomial_schedule(1.0, 0.0, power, 4)(torch.tensor(4.0)).item() == 1.0


def test_a_negative_number_of_steps_is_no_transition():
    assert polynomial_schedule(0.7, 0.1, 1.0, -1, 2)(9) == 0.7


def test_growth_without_an_end_becomes_infinite():
    schedule = exponential_decay(1.0, 2.0)
    assert schedule(5000) == schedule(torch.tensor(5000.0)).item() == math.inf


@each_row("count", [0, 1, 2, 5000, torch.tensor(0.0), torch.tensor(5000.0)])
@each_row("which", ["init_value", "decay_rate", "end_value"])
def test_one_tensor_among_numbers_makes_a_tensor_of_its_precision(count, which):
    values = {"init_value": 0.7, "decay_rate": 0.5, "end_value": 0.1}
    learned = torch.tensor(values[which], requires_grad=True)
    value = exponential_decay(**{**values, which: learned}, transition_steps=3)(count)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(max(0.7 * 0.5 ** (float(count) / 3), 0.1), rel=1e-6)
    (gradient,) = torch.autograd.grad(value, learned)
    assert gradient.isfinite()


def test_join_calls_only_the_part_of_a_number_and_each_within_its_part():
    seen = []

    def spy(place):
        def schedule(count):
            seen.append((place, float(count)))
            return count * 0.0 + place

        return schedule

    schedule = join_schedules([spy(0), spy(1), spy(2)], [3, 5])
    assert [schedule(count) for count in (2, 3, 5)] == [0, 1, 2]
    assert seen == [(0, 2), (1, 0), (2, 0)]
    seen.clear()
    assert schedule(torch.tensor(4.0)).item() == 1.0
    assert seen == [(0, 3), (1, 1), (2, 0)]


def test_join_of_one_schedule_is_that_schedule():
    schedule = join_schedules([linear_schedule(1.0, 0.0, 4)], [])
    assert schedule(1) == schedule(torch.tensor(1.0)).item() == 0.75


def test_join_hands_on_plain_numbers_as_tensors_of_full_precision():
    value = join_schedules([lambda count: 0.1, lambda count: 0.2], [1])(
        torch.tensor(1.0, dtype=torch.float64)
    )
    assert value.item() == 0.2
    assert value.dtype == torch.float64


def test_an_optimizer_steps_its_schedule_by_itself():
    w = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = todist.SGD([w], lr=linear_schedule(0.4, 0.0, 4))
    moved = []
    for _ in range(5):
        w.grad = torch.ones_like(w)
        optimizer.step()
        moved.append(w.item())
    assert moved == pytest.approx([-0.4, -0.7, -0.9, -1.0, -1.0], rel=1e-12)


def test_a_meta_gradient_of_a_schedule():
    peak = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)

    def after_three_steps(peak):
        optimizer = todist.FuncOptimizer(todist.sgd(lr=linear_schedule(peak, 0.1, 4)))
        w = (torch.ones(2, dtype=torch.float64, requires_grad=True),)
        for _ in range(3):
            w = optimizer.step((w[0] ** 2).sum(), w)
        return w[0].sum()

    p = peak.item()
    assert after_three_steps(peak).item() == pytest.approx(
        2 * math.prod(1 - 2 * (p + (0.1 - p) * t / 4) for t in range(3))
    )
    assert gradcheck(after_three_steps, peak)
    assert gradgradcheck(after_three_steps, peak)


def test_a_compiled_update_with_a_schedule():
    impl = todist.sgd(lr=linear_schedule(0.5, 0.0, 4))
    compiled = torch.compile(impl.update, fullgraph=True, backend="eager")
    state = impl.init([torch.ones(2)])
    updates, state = compiled([torch.ones(2)], state)
    updates, state = compiled([torch.ones(2)], state)
    assert torch.equal(updates[0], torch.full((2,), -0.375))


@each_row("file", ["cosine", "exponential", "joined", "polynomial"])
def test_a_schedule_pickled_in_a_former_file_is_read(file: str) -> None:
    made = {
        "cosine": todist.schedule.cosine_decay(1.0, 4),
        "exponential": todist.schedule.exponential_decay(1.0, 0.5),
        "joined": todist.schedule.warmup_cosine(0.0, 1.0, 2, 4),
        "polynomial": todist.schedule.polynomial_schedule(1.0, 0.0, 2.0, 4),
    }[file]
    former = b"cosine" if file == "joined" else file.encode()
    text = pickle.dumps(made, protocol=0)  # where a module's name is a line of its own, without its length
    for now in (b"transitions", b"joined"):
        text = text.replace(b"torchopt_dist.schedule." + now, b"torchopt_dist.schedule." + former)
    read = pickle.loads(text)
    assert former in text
    assert [read(count) for count in range(5)] == [made(count) for count in range(5)]
