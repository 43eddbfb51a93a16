"""Pictures of graphs: boxes, names, edges, sizes, remote calls, and what is refused."""

from __future__ import annotations

import gc
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import torchopt_dist as todist
from tests.distributed.programs import cube
from tests.optim.graph import count_nodes
from tests.pictures import parsed
from tests.rows import each_row
from torchopt_dist.visual import make_dot, resize_graph

OPERATIONS = {"lightgrey", "plum"}


def two_steps(by="reference"):
    """A loss after two inner steps, and the snapshots before, between and after."""
    torch.manual_seed(0)
    net = nn.Linear(2, 1)
    lr = torch.tensor(0.1, requires_grad=True)
    optimizer = todist.MetaSGD(net, lr=lr)
    x, states = torch.ones(3, 2), []
    for step in range(3):
        states.append(todist.extract_state_dict(net, by=by, enable_visual=True, visual_prefix=f"step{step}."))
        loss = net(x).pow(2).sum()
        if step < 2:
            optimizer.step(loss)
    return loss, states, lr


def test_a_small_graph_is_drawn_as_it_is():
    w, x = torch.ones(2, requires_grad=True), torch.ones(2)
    picture = parsed((w * w * x).sum(), {"w": w})
    assert picture.said(picture.edges) == {
        ("w", "AccumulateGrad"): 1,
        ("AccumulateGrad", "MulBackward0"): 2,
        ("MulBackward0", "MulBackward0"): 1,
        ("MulBackward0", "SumBackward0"): 1,
        ("SumBackward0", "output"): 1,
    }
    assert picture.having("lightblue") == [["w", "(2,)"]]
    assert picture.having("palegreen") == [["output", "()"]]
    assert len(picture.having("lightgrey")) == 4
    assert picture.saved == []


def test_operations_are_those_of_the_graph():
    loss, states, _ = two_steps()
    for params in (None, states):
        picture = parsed(loss, params)
        assert sum(colour in OPERATIONS for colour in picture.colour.values()) == count_nodes(loss)


def test_inner_steps_are_labelled_by_their_prefix():
    loss, states, lr = two_steps()
    picture = parsed(loss, [*states, {"lr": lr, "loss": loss}])
    assert picture.having("lightblue") == [["lr", "()"], ["step0.bias", "(1,)"], ["step0.weight", "(1, 2)"]]
    assert picture.having("lightyellow") == [
        ["step1.bias", "(1,)"],
        ["step1.weight", "(1, 2)"],
        ["step2.bias", "(1,)"],
        ["step2.weight", "(1, 2)"],
    ]
    assert picture.having("palegreen") == [["loss", "()"]]
    ways = picture.said(picture.edges)
    for step in (1, 2):
        # what computes with the step's parameters hangs on their box, not on what made them
        assert sum(number for (end, _), number in ways.items() if end == f"step{step}.bias") >= 1
        assert sum(number for (_, end), number in ways.items() if end == f"step{step}.bias") == 1
    made = {source for source, end, _ in picture.edges if picture.label[end][0].startswith("step1.")}
    used = {end for source, end, _ in picture.edges if source in made}
    assert {picture.label[name][0] for name in used} == {"step1.bias", "step1.weight"}


def test_snapshots_that_are_copies_are_drawn_where_they_are_used():
    net = nn.Linear(2, 1, bias=False)
    state = todist.extract_state_dict(net, by="copy", enable_visual=True, visual_prefix="copy.")
    before = net.weight
    todist.recover_state_dict(net, state)
    picture = parsed(net(torch.ones(1, 2)).sum(), [{"first": before}, state])
    assert picture.said(picture.edges)["CloneBackward0", "copy.weight"] == 1
    assert picture.having("lightblue") == [["first", "(1, 2)"]]


def test_tied_weights_are_one_box_with_both_names():
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    net[1].weight = net[0].weight
    for params in (
        todist.extract_state_dict(net, enable_visual=True),
        net.named_parameters(remove_duplicate=False),
        [net[0].named_parameters("0"), {"1.weight": net[1].weight, "0.weight": net[0].weight}],
    ):
        params = list(params) if not isinstance(params, tuple) else params
        picture = parsed(net(torch.ones(2)).sum(), params)
        assert picture.having("lightblue") == [["0.weight", "1.weight", "(2, 2)"]]


def test_names_come_in_any_form():
    net = nn.Linear(2, 1)
    out = net(torch.ones(2))
    state = todist.extract_state_dict(net, enable_visual=True)
    want = [["bias", "(1,)"], ["weight", "(1, 2)"]]
    for params in (
        dict(net.named_parameters()),
        net.named_parameters(),
        [("weight", net.weight), ("bias", net.bias)],
        state,
        [state, state],
        (net.named_parameters() for _ in range(1)),
        [[state], {}],
    ):
        assert parsed(out, params).having("lightblue") == want
    for params in (None, {"elsewhere": torch.ones(1, requires_grad=True)}):
        assert parsed(out, params).having("lightblue") == [["(1, 2)"], ["(1,)"]]


def test_several_outputs_are_named_by_their_place():
    w = torch.ones(2, requires_grad=True)
    loss = w.sum()
    picture = parsed({"loss": loss, "more": [loss.exp(), None, w]}, {"w": w})
    assert picture.having("palegreen") == [["output loss", "()"], ["output more 0", "()"], ["w", "(2,)"]]
    assert picture.said(picture.edges)["output loss", "ExpBackward0"] == 1
    assert parsed((loss, loss)).having("palegreen") == [["output 0", "()"]]


def test_a_result_among_several_of_one_operation_has_its_own_box():
    w = torch.ones(3, requires_grad=True)
    first, _, third = w.unbind()
    picture = parsed(first * third, {"first": first, "third": third})
    assert picture.said(picture.edges) == {
        ("(3,)", "AccumulateGrad"): 1,
        ("AccumulateGrad", "UnbindBackward0"): 1,
        ("UnbindBackward0", "first"): 1,
        ("UnbindBackward0", "third"): 1,
        ("first", "MulBackward0"): 1,
        ("third", "MulBackward0"): 1,
        ("MulBackward0", "output"): 1,
    }


def test_equal_graphs_give_equal_text():
    texts = set()
    for _ in range(3):
        loss, states, lr = two_steps()
        texts.add(make_dot(loss, [*states, {"lr": lr}], show_attrs=True, show_saved=True).source)
        gc.collect()
    assert len(texts) == 1


@each_row(
    ("name", "written"),
    [("<b>", "<b>"), ('say "w"', r"say \"w\""), ("a\\l", r"a\\l"), ("end\\", "end\\\\"), ("é", "é")],
)
def test_names_are_no_markup(name, written):
    w = torch.ones(1, requires_grad=True)
    assert f'[label="{written}\\n(1,)" fillcolor=lightblue]' in make_dot(w.exp(), {name: w}).source


class Remote(torch.autograd.Function):
    @staticmethod
    def forward(ctx, graph, x):
        ctx.graph = graph
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None, grad


def test_a_node_that_names_a_worker_is_a_remote_call():
    w = torch.ones(1, requires_grad=True)
    picture = parsed(Remote.apply(SimpleNamespace(worker_name="worker1"), w))
    assert picture.having("plum") == [["remote call to worker1", "RemoteBackward"]]
    picture = parsed(Remote.apply(SimpleNamespace(worker_name=1), Remote.apply(None, w)))
    assert picture.having("plum") == []


def test_a_real_remote_call_has_two_ends(world):
    def body():
        w = torch.ones(1, requires_grad=True)
        out = todist.remote_sync_call(cube, args=(w,), partitioner=1)[0]
        picture = parsed(out, {"w": w})
        return picture.having("plum"), picture.said(picture.edges)

    ends, edges = world(2).on_zero(body)
    assert ends == [
        ["remote call to worker1", "_CollectBackward"],
        ["remote call to worker1", "_DispatchBackward"],
    ]
    assert edges["remote call to worker1", "remote call to worker1"] == 1
    assert edges["AccumulateGrad", "remote call to worker1"] == 1
    assert edges["remote call to worker1", "output"] == 1


def test_the_size_grows_with_the_picture():
    small, large = torch.ones(1, requires_grad=True).exp(), torch.ones(1, requires_grad=True)
    for _ in range(20):
        large = large.exp()
    assert make_dot(small).graph_attr["size"] == "12,12"
    dot = make_dot(large)
    assert dot.graph_attr["size"] == f"{len(dot.body) / 2:g},{len(dot.body) / 2:g}"
    assert resize_graph(dot, size_per_element=0, min_size=3.5) is None
    assert dot.graph_attr["size"] == "3.5,3.5"
    assert 'size="3.5,3.5"' in dot.source


@each_row(
    ("var", "error", "message"),
    [
        (3, TypeError, "`var` must be a tensor or a tree of tensors, got int"),
        ([torch.ones(1), "x"], TypeError, "`var` must be a tensor or a tree of tensors, got str"),
        (torch.ones(2), ValueError, r"`var` must have a history .*\[\(2,\)\] without one"),
        (torch.ones(2, requires_grad=True), ValueError, "`var` must have a history"),
        ([], ValueError, "`var` must have a history"),
    ],
)
def test_a_wrong_output_is_refused(var, error, message):
    with pytest.raises(error, match=message):
        make_dot(var)


@each_row(
    ("params", "error", "message"),
    [
        (3, TypeError, "`params` must be a mapping, .*, got int"),
        ("w", TypeError, "`params` must be .*, got str"),
        (torch.ones(2), TypeError, "`params` must be .*, got Tensor"),
        (nn.Linear(1, 1), TypeError, "`params` must be .*, got Linear"),
        ([torch.ones(1)], TypeError, "`params` must be .*, got Tensor"),
        ({"w": 3}, TypeError, r"`params\['w'\]` must be a tensor, got int"),
        (todist.extract_state_dict(nn.Linear(1, 1)), ValueError, "enable_visual=True"),
    ],
)
def test_wrong_names_are_refused(params, error, message):
    with pytest.raises(error, match=message):
        make_dot(torch.ones(1, requires_grad=True).exp(), params)


def test_wrong_sizes_are_refused():
    out = torch.ones(1, requires_grad=True).exp()
    with pytest.raises(ValueError, match="`max_attr_chars` must be at least 1, got 0"):
        make_dot(out, max_attr_chars=0)
    dot = make_dot(out)
    for name in ("size_per_element", "min_size"):
        for value in (-1.0, float("nan")):
            with pytest.raises(ValueError, match=f"`{name}` must be at least 0, got {value}"):
                resize_graph(dot, **{name: value})


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "graphviz", None)
    with pytest.raises(
        ImportError, match=r"`make_dot` needs .* `graphviz`: pip install 'torchopt_dist\[visual\]'"
    ):
        make_dot(torch.ones(1, requires_grad=True).exp())
