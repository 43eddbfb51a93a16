import threading
from collections import OrderedDict
from concurrent.futures import Future as ThreadFuture
from fractions import Fraction

import numpy
import optree
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.distributed import rpc
from torch.func import vmap
from torch.futures import Future

import torchopt_dist as todist
from tests.rows import each_row
from torchopt_dist import pytree
from torchopt_dist.pytree import structure


def test_none_is_a_leaf():
    leaves, spec = pytree.flatten({"a": None, "b": (1, 2)})
    assert leaves == [None, 1, 2]
    assert pytree.unflatten(spec, [7, 8, 9]) == {"a": 7, "b": (8, 9)}
    assert pytree.flatten_like(spec, {"a": 1, "b": (None, 2)}, "updates", "params") == [1, None, 2]
    assert pytree.tree_map(lambda x, y: (x, y), [None], [1]) == [(None, 1)]


def test_map_tensors_leaves_the_rest():
    assert pytree.map_tensors(lambda t: t.item(), [torch.tensor(2.0), None, 3]) == [2.0, None, 3]


def test_is_leaf():
    assert pytree.is_leaf(None)
    assert pytree.is_leaf(torch.ones(1))
    assert not pytree.is_leaf([])


def test_another_structure_is_refused_by_name():
    spec = pytree.flatten([1])[1]
    with pytest.raises(ValueError, match=r"`updates` must have the structure of `params`, .*, got"):
        pytree.flatten_like(spec, {"a": 1}, "updates", "params")
    assert pytree.flatten_like(spec, (1,), "updates", "params") == [1], "a list and a tuple are the same"


def test_tree_map_takes_optree_s_keywords():
    assert pytree.tree_map(str, [None, 1]) == ["None", "1"]
    assert pytree.tree_map(str, [None, 1], none_is_leaf=False) == [None, "1"]
    assert pytree.tree_map(len, [(1, 2), (3,)], is_leaf=lambda x: isinstance(x, tuple)) == [2, 1]


def test_optree_s_functions_are_left_to_optree():
    shared = [name for name in pytree.__all__ if hasattr(optree, name)]
    assert shared == ["PyTreeSpec", "tree_map"]
    assert pytree.PyTreeSpec is optree.PyTreeSpec
    assert optree.tree_map(str, [None, 1]) == [None, "1"], "its `None` is no leaf, where ours is one"


def tree(a, b):
    return {"a": a, "b": [b, None]}


def vectors(count, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 2, dtype=dtype, generator=generator, requires_grad=True) for _ in range(count)]


ARITHMETIC = {
    "add": (pytree.tree_add, lambda x, y, z: x + y + z, 3),
    "mul": (pytree.tree_mul, lambda x, y, z: x * y * z, 3),
    "matmul": (pytree.tree_matmul, lambda x, y, z: x @ y @ z, 3),
    "sub": (pytree.tree_sub, lambda x, y: x - y, 2),
    "truediv": (pytree.tree_truediv, lambda x, y: x / y, 2),
    "neg": (pytree.tree_neg, lambda x: -x, 1),
    "pos": (pytree.tree_pos, lambda x: +x, 1),
    "add_scalar_mul": (lambda x, y: pytree.tree_add_scalar_mul(x, y, 0.5), lambda x, y: x + 0.5 * y, 2),
    "add_scalar_mul, no alpha": (pytree.tree_add_scalar_mul, lambda x, y: x + y, 2),
    "sub_scalar_mul": (lambda x, y: pytree.tree_sub_scalar_mul(x, y, 0.5), lambda x, y: x - 0.5 * y, 2),
    "sub_scalar_mul, no alpha": (pytree.tree_sub_scalar_mul, lambda x, y: x - y, 2),
    "scalar_mul": (lambda x: pytree.tree_scalar_mul(2.5, x), lambda x: 2.5 * x, 1),
}


@each_row(("on_trees", "on_leaves", "arity"), ARITHMETIC.values())
@each_row("dtype", [torch.float64, torch.complex128])
def test_arithmetic_goes_leaf_by_leaf(on_trees, on_leaves, arity, dtype):
    xs, ys = vectors(2 * arity, dtype)[:arity], vectors(2 * arity, dtype)[arity:]
    got = on_trees(*(tree(x, y) for x, y in zip(xs, ys, strict=True)))
    assert got.keys() == {"a", "b"}
    assert torch.equal(got["a"], on_leaves(*xs))
    assert torch.equal(got["b"][0], on_leaves(*ys))
    assert got["b"][1] is None


@each_row(("on_trees", "on_leaves", "arity"), ARITHMETIC.values())
def test_arithmetic_is_differentiable_and_batched(on_trees, on_leaves, arity):
    def first(*leaves):
        return on_trees(*({"a": leaf, "b": None} for leaf in leaves))["a"]

    leaves = vectors(arity)
    assert gradcheck(first, leaves)
    assert gradgradcheck(first, leaves)
    batches = [torch.stack([leaf.detach(), 2 * leaf.detach()]) for leaf in leaves]
    want = torch.stack([on_leaves(*(batch[i] for batch in batches)) for i in range(2)])
    assert torch.allclose(vmap(first)(*batches), want)


def test_numbers_of_any_type():
    assert pytree.tree_add([1, 2.5], [1, 1]) == [2, 3.5]
    assert pytree.tree_mul([Fraction(1, 2)], [Fraction(1, 3)]) == [Fraction(1, 6)]
    assert pytree.tree_sub([1j, True], [1, 1]) == [1j - 1, 0]
    assert pytree.tree_truediv([1], [4]) == [0.25]
    assert pytree.tree_scalar_mul(Fraction(1, 2), [3]) == [Fraction(3, 2)]
    assert pytree.tree_add([numpy.float64(1)], [torch.ones(1)])[0].item() == 2


def test_one_tree_and_an_empty_tree():
    x = torch.ones(1)
    assert pytree.tree_add([x])[0] is x
    assert pytree.tree_add({}, {}) == {}
    assert pytree.tree_neg(()) == ()
    assert pytree.tree_neg(3) == -3


def test_inputs_stay_as_they_are():
    x, y = torch.ones(2), torch.full((2,), 3.0)
    given = [x], [y]
    for function in (
        pytree.tree_add,
        pytree.tree_mul,
        pytree.tree_add_scalar_mul,
        pytree.tree_sub_scalar_mul,
    ):
        function(*given)
    assert (x.tolist(), y.tolist()) == ([1.0, 1.0], [3.0, 3.0])


def test_an_ordered_dict_goes_with_a_dict():
    got = pytree.tree_sub(OrderedDict([("b", 5), ("a", 3)]), {"a": 1, "b": 2})
    assert got == OrderedDict([("b", 3), ("a", 2)])
    assert isinstance(got, OrderedDict)


@each_row("shape", [(), (1,)])
@each_row(
    "function",
    [
        lambda alpha, x, y: pytree.tree_scalar_mul(alpha, [x])[0] + y,
        lambda alpha, x, y: pytree.tree_add_scalar_mul([x], [y], alpha)[0],
        lambda alpha, x, y: pytree.tree_sub_scalar_mul([x], [y], alpha)[0],
    ],
)
def test_a_scalar_given_as_a_tensor_gets_its_gradient(function, shape):
    alpha = torch.full(shape, 0.3, dtype=torch.float64, requires_grad=True)
    x, y = vectors(2)
    assert gradcheck(function, (alpha, x, y))
    assert gradgradcheck(function, (alpha, x, y))
    assert function(alpha, torch.ones((), dtype=torch.float64), torch.ones(())).shape == ()
    assert vmap(function, (0, None, None))(torch.ones(3, dtype=torch.float64), x, y).shape == (3, 2, 2)
    assert torch.func.grad(lambda a: function(a, x, y).sum())(alpha.detach()).shape == shape


@each_row("leaf", [torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.bfloat16)])
def test_a_scalar_tensor_does_not_widen_a_leaf_and_promotes_as_in_torch(leaf):
    alpha = torch.tensor(0.5, dtype=torch.float64)
    want = torch.result_type(alpha, leaf)
    assert pytree.tree_scalar_mul(alpha, [leaf])[0].dtype == want
    assert pytree.tree_scalar_mul(0.5, [leaf])[0].tolist() == [0.5, 0.5]


@each_row(("wrong", "error"), [("2", TypeError), (None, TypeError), (torch.ones(2), ValueError)])
def test_a_wrong_scalar_is_refused_by_name(wrong, error):
    with pytest.raises(error, match=r"`scalar` .*must (be a number|have one element).*, got"):
        pytree.tree_scalar_mul(wrong, [1])
    if wrong is not None:
        for function in (pytree.tree_add_scalar_mul, pytree.tree_sub_scalar_mul):
            with pytest.raises(error, match=r"`alpha` .*must (be a number|have one element).*, got"):
                function([1], [1], wrong)


@each_row(
    "other", [[1], {"a": 1}, {"a": 1, "b": 2, "c": 3}, {"a": 1, "b": None}, {"a": 1, "b": (1, 2)}, 7, None]
)
def test_a_tree_of_another_structure_is_refused_by_name(other):
    x = {"a": 1, "b": 2}
    for function in (pytree.tree_add, pytree.tree_mul, pytree.tree_matmul):
        with pytest.raises(
            ValueError, match=r"`trees\[2\]` must have the structure of `trees\[0\]`, .*, got"
        ):
            function(x, x, other)
    for function, first, second in (
        (pytree.tree_sub, "minuend_tree", "subtrahend_tree"),
        (pytree.tree_truediv, "dividend_tree", "divisor_tree"),
        (pytree.tree_add_scalar_mul, "tree_x", "tree_y"),
        (pytree.tree_sub_scalar_mul, "tree_x", "tree_y"),
        (pytree.tree_vdot_real, "tree_x", "tree_y"),
    ):
        with pytest.raises(ValueError, match=rf"`{second}` must have the structure of `{first}`, .*, got"):
            function(x, other)


@each_row("function", [pytree.tree_add, pytree.tree_mul, pytree.tree_matmul])
def test_no_tree_at_all_is_refused(function):
    with pytest.raises(TypeError, match="`trees` must be one tree or more, got none"):
        function()


def test_the_real_inner_product_of_complex_trees():
    x, y, u, v = vectors(4, torch.complex128)
    want = sum((a.conj() * b).sum().real for a, b in ((x, y), (u, v)))
    got = pytree.tree_vdot_real(tree(x, u), tree(y, v))
    assert got.shape == ()
    assert got.dtype == torch.float64
    assert torch.allclose(got, want)
    pairs = [(torch.view_as_real(a).flatten(), torch.view_as_real(b).flatten()) for a, b in ((x, y), (u, v))]
    assert torch.allclose(got, sum(a @ b for a, b in pairs))


def test_the_inner_product_is_differentiable_and_batched():
    def inner(x, y, u, v):
        return pytree.tree_vdot_real([x, u], [y, v])

    for leaves in (vectors(4), vectors(4, torch.complex128), [*vectors(2), *vectors(2, torch.complex128)]):
        assert gradcheck(inner, leaves)
        assert gradgradcheck(inner, leaves)
    x, y, u, v = (leaf.detach() for leaf in vectors(4))
    rows = vmap(inner)(x, y, u, v)
    assert torch.allclose(rows, torch.stack([inner(x[i], y[i], u[i], v[i]) for i in range(2)]))
    assert torch.equal(torch.func.grad(inner)(x, y, u, v), y)


def test_the_inner_product_of_mixed_leaves():
    assert pytree.tree_vdot_real({}, {}) == 0
    assert pytree.tree_vdot_real([1 + 2j, 3], [1j, 4]) == 2 + 12
    got = pytree.tree_vdot_real([torch.tensor(2.0, dtype=torch.float64), 1], [0.1, 1])
    assert got.dtype == torch.float64
    assert got.item() == 2 * 0.1 + 1
    mixed = pytree.tree_vdot_real([torch.ones(2), torch.ones(2)], [torch.ones(2).double(), torch.ones(2)])
    assert (mixed.dtype, mixed.item()) == (torch.float64, 4.0)
    assert pytree.tree_vdot_real([torch.tensor([1, 2])], [torch.tensor([3, 4])]).item() == 11
    transposed = torch.arange(4.0).reshape(2, 2).T
    assert pytree.tree_vdot_real(transposed, torch.arange(4.0).reshape(2, 2)).item() == 0 + 2 + 2 + 9


def test_the_inner_product_ends_on_the_first_device():
    x = [torch.ones(2, device="meta"), torch.ones(2)]
    got = pytree.tree_vdot_real(x, [torch.ones(2), torch.ones(2)])
    assert (got.device.type, got.shape) == ("meta", ())


def test_leaves_of_other_shapes_have_no_inner_product():
    with pytest.raises(ValueError, match=r"leaves of `tree_x` and `tree_y` must .*, got \(2,\) and \(1,\)"):
        pytree.tree_vdot_real([torch.ones(2)], [torch.ones(1)])


@pytest.mark.parametrize("before_2_13", [True, structure._BEFORE_2_13], ids=["before 2.13", "this"])
def test_comparing_structures_compiles(before_2_13, monkeypatch):
    monkeypatch.setattr(structure, "_BEFORE_2_13", before_2_13)
    x, y = torch.ones(2), torch.zeros(2)
    trees = [x, [], [x], (x,), [x, y], [x, [y]], [[x], y], {"a": x}, {"b": x}, OrderedDict(a=x)]
    again = [x + 1, [], [y], (y,), [x, x], [y, [y]], [[y], y], {"a": y}, {"b": y}, OrderedDict(a=y)]

    def differ(trees, others):
        one, two = ([pytree.flatten(tree)[1] for tree in side] for side in (trees, others))
        return [structure._differ(a, b) for a in one for b in two], x + y

    got, _ = torch.compile(differ, fullgraph=True, backend="eager")(trees, again)
    same = [{i} for i in range(len(trees))] + [{2, 3}]  # a list and a tuple
    assert got == [{i, j} not in same for i in range(len(trees)) for j in range(len(again))]
    torch.compiler.reset()


def test_arithmetic_compiles_into_one_graph():
    def step(params, grads, lr):
        params = pytree.tree_sub_scalar_mul(params, grads, lr)
        return pytree.tree_add(params, params, params), pytree.tree_vdot_real(params, grads)

    params, grads = tree(torch.ones(2), torch.ones(3)), tree(torch.ones(2), torch.full((3,), 2.0))
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    got, want = compiled(params, grads, torch.tensor(0.1)), step(params, grads, torch.tensor(0.1))
    assert torch.equal(got[0]["b"][0], want[0]["b"][0])
    assert torch.equal(got[1], want[1])


def test_waiting_for_futures_of_both_kinds():
    first, second = Future(), ThreadFuture()
    threading.Timer(0.05, first.set_result, [torch.ones(1)]).start()
    second.set_result(2)
    got = pytree.tree_wait({"a": first, "b": [second, None]})
    assert (got["a"].item(), got["b"]) == (1.0, [2, None])
    assert pytree.tree_wait([]) == []


def test_a_future_that_fails_is_raised_when_all_are_done():
    bad, worse, late = ThreadFuture(), ThreadFuture(), ThreadFuture()
    bad.set_exception(KeyError("first"))
    worse.set_exception(ValueError("second"))
    threading.Timer(0.05, late.set_result, [1]).start()
    with pytest.raises(KeyError, match="first"):
        pytree.tree_wait([bad, late, worse])
    assert late.done()


def test_what_is_no_future_or_no_reference_is_refused():
    with pytest.raises(TypeError, match="`future_tree` must be a tree of futures, got int"):
        pytree.tree_wait([1])
    with pytest.raises(TypeError, match="`rref_tree` must be a tree of RRefs, got int"):
        pytree.tree_to_here([1])


def test_a_reference_outside_a_group_is_refused():
    for _ in range(2):
        with pytest.raises(todist.errors.NotInitializedError, match="`tree_as_rref` needs an RPC group"):
            pytree.tree_as_rref([1])
        todist.auto_init_rpc()(todist.get_rank)()  # after a group there is none, either


def test_references_are_made_and_fetched(world):
    def body():
        given = {"a": torch.arange(3.0), "b": [None, 2]}
        references = pytree.tree_as_rref(given)
        assert [reference.is_owner() for reference in optree.tree_leaves(references)] == [True, True]
        back = pytree.tree_to_here(references)
        there = rpc.rpc_sync("worker1", pytree.tree_to_here, args=(references, 5.0))
        return [(tree["a"].tolist(), tree["b"]) for tree in (back, there)]

    assert world(2).on_zero(body) == [([0.0, 1.0, 2.0], [None, 2])] * 2


def test_futures_made_by_then_are_waited_for():
    future = torch.futures.Future()
    after = future.then(lambda done: done.value() + 1)
    future.set_result(3)
    assert pytree.tree_wait([future, after]) == [3, 4]
