import copy
import math
import pickle

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, vmap

from tests.rows import each_row
from torchopt_dist.transform.base import EmptyState
from torchopt_dist.transform.nan_to_num import nan_to_num

WILD = [math.nan, math.inf, -math.inf, -1.5, 0.0]
CHOICES = [{}, {"nan": 2.0}, {"posinf": 7, "neginf": -8.5}]


def apply(impl, *grads):
    return tuple(impl.update(list(grads), impl.init(list(grads)))[0])


@each_row("kwargs", CHOICES)
@each_row("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_values_are_torchs(dtype, kwargs):
    wild = torch.tensor(WILD).to(dtype)
    if dtype.is_complex:
        wild = torch.complex(torch.tensor(WILD), torch.tensor(WILD[::-1]))
    got = apply(nan_to_num(**kwargs), wild, wild.reshape(5, 1).expand(5, 2))
    want = torch.nan_to_num(wild, **{"nan": 0.0, **kwargs})
    assert torch.equal(got[0], want)
    assert torch.equal(got[1], want.reshape(5, 1).expand(5, 2))
    assert got[0].dtype == dtype


def test_none_stays_none_and_nothing_is_overwritten():
    wild = torch.tensor(WILD)
    with torch.no_grad():
        updates, _ = nan_to_num().update({"a": None, "b": wild}, EmptyState(), inplace=True)
    assert updates["a"] is None
    assert wild[0].isnan()


@each_row("dtype", [torch.float64, torch.complex128])
def test_derivatives(dtype):
    torch.manual_seed(0)
    x = torch.randn(3, dtype=dtype, requires_grad=True)

    def replaced(x):
        return apply(nan_to_num(), x**2)

    assert gradcheck(replaced, (x,))
    assert gradgradcheck(replaced, (x,))


def test_no_gradient_passes_a_replaced_entry():
    wild = torch.tensor([math.nan, math.inf, 3.0], requires_grad=True)
    slope = torch.autograd.grad(apply(nan_to_num(), wild)[0].sin().sum(), wild)[0]
    assert torch.equal(slope, torch.tensor([0.0, 0.0, math.cos(3.0)]))
    part = torch.tensor([complex(math.nan, 2.0)], requires_grad=True)
    assert torch.autograd.grad(apply(nan_to_num(), part)[0].imag.square().sum(), part)[0].item() == 4j


def test_func_grad_under_vmap_equals_a_loop():
    wild = torch.tensor([[math.nan, 2.0], [-1.0, math.inf]])

    def squares(x):
        return apply(nan_to_num(posinf=5.0), x)[0].square().sum()

    assert torch.equal(vmap(squares)(wild), torch.tensor([4.0, 26.0]))
    assert torch.equal(vmap(grad(squares))(wild), torch.tensor([[0.0, 4.0], [-2.0, 0.0]]))


def test_compiles_into_one_graph():
    compiled = torch.compile(nan_to_num(1.0).update, fullgraph=True, backend="eager")
    updates, _ = compiled({"a": torch.tensor([math.nan, 2.0]), "b": None}, EmptyState())
    assert torch.equal(updates["a"], torch.tensor([1.0, 2.0]))


@each_row("again", [copy.deepcopy, lambda impl: pickle.loads(pickle.dumps(impl))])
def test_copies_and_pickles(again):
    assert apply(again(nan_to_num(3.0)), torch.tensor(math.nan))[0].item() == 3.0


@each_row(
    ("args", "message"),
    [
        ((None,), "`nan` must be a number, got NoneType"),
        ((0.0, "big"), "`posinf` must be a number or None, got str"),
        ((0.0, None, [1]), "`neginf` must be a number or None, got list"),
    ],
)
def test_bad_arguments_are_refused(args, message):
    with pytest.raises(TypeError, match=message):
        nan_to_num(*args)
