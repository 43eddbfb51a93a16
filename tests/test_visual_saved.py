"""Pictures that show what operations have saved, and their attributes."""

from __future__ import annotations

import torch
from torch.autograd.graph import save_on_cpu

from tests.pictures import parsed
from torchopt_dist.visual import make_dot


def test_saved_tensors_hang_on_dashed_edges():
    w, x = torch.ones(2, requires_grad=True), torch.ones(2)
    out = ((w * x).exp() * w).sum()
    picture = parsed(out, {"w": w, "x": x}, show_saved=True)
    by_name = {
        (tuple(picture.label[source]), picture.label[end][0], name) for source, end, name in picture.saved
    }
    assert by_name == {
        (("x", "(2,)"), "MulBackward0", "other"),
        (("w", "(2,)"), "MulBackward0", "other"),
        (("(2,)",), "MulBackward0", "self"),
        (("(2,)",), "ExpBackward0", "result"),
    }
    assert picture.having("orange") == [["(2,)"], ["x", "(2,)"]]  # what exp and mul have saved is one tensor
    plain = parsed(out, {"w": w, "x": x})
    assert plain.said(plain.edges) == picture.said(picture.edges)
    assert plain.saved == plain.having("orange") == []


def test_a_saved_tensor_with_a_name_is_its_own_box():
    w = torch.ones(2, requires_grad=True)
    moved = w - 0.1 * w.exp()
    picture = parsed(moved.pow(2).sum(), {"step1.w": moved}, show_saved=True)
    saved = {(picture.label[source][0], picture.label[end][0]) for source, end, _ in picture.saved}
    assert ("step1.w", "PowBackward0") in saved
    assert picture.having("lightyellow") == [["step1.w", "(2,)"]]


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, None, x)
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def test_what_a_python_function_has_saved():
    w = torch.ones(2, requires_grad=True)
    picture = parsed(Twice.apply(w), {"w": w}, show_attrs=True, show_saved=True)
    assert [(picture.label[source][0], name) for source, _, name in picture.saved] == [
        ("w", "saved_tensors"),
        ("w", "saved_tensors"),
    ]
    assert ["TwiceBackward", "saved_tensors: (tensor (2,), None, tensor (2,))"] in picture.having("lightgrey")


def test_attributes_are_listed_and_shortened():
    w = torch.ones(2, 3, requires_grad=True)
    out = w.log_softmax(-1).sum(-1)
    operations = parsed(out, show_attrs=True).having("lightgrey")
    assert ["SumBackward1", "dim: (-1,)", "keepdim: False", "self_sym_sizes: (2, 3)"] in operations
    assert ["LogSoftmaxBackward0", "dim: -1", "result: tensor (2, 3)"] in operations
    operations = parsed(out, show_attrs=True, max_attr_chars=4).having("lightgrey")
    assert ["LogSoftmaxBackward0", "dim: -1", "result: ten…"] in operations
    assert ["SumBackward1"] in parsed(out).having("lightgrey")


def test_a_graph_that_is_used_up_can_be_drawn():
    w = torch.ones(2, requires_grad=True)
    out = Twice.apply(w.exp()).sum()
    out.backward()
    picture = parsed(out, show_attrs=True, show_saved=True)
    assert ["ExpBackward0", "result: freed"] in picture.having("lightgrey")
    assert ["TwiceBackward", "saved_tensors: freed"] in picture.having("lightgrey")
    assert picture.saved == []


def test_saved_tensors_that_are_unpacked_anew_each_time():
    w = torch.ones(2, requires_grad=True)
    with save_on_cpu():
        out = (w * torch.full((2,), 2.0)).exp()
    assert make_dot(out, show_saved=True).source == make_dot(out, show_saved=True).source
