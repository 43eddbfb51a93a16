from functools import partial

import pytest
import torch
from torch import nn

import torchopt_dist as todist
from tests.rows import each_row
from torchopt_dist import module_detach_
from torchopt_dist.nn import (
    ModuleState,
    extract_state_dict,
    module_clone,
    recover_state_dict,
    stop_gradient,
)
from torchopt_dist.nn._tensor_dicts import parts_and_parameters

MODES = ["reference", "ref", "copy", "clone", "deepcopy"]


class Net(nn.Module):
    """Tied and frozen weights, a shared sub-module, both kinds of buffers, a parameter that is not there."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight
        self.again = self.first
        self.norm = nn.BatchNorm1d(2)
        self.norm.weight.requires_grad_(False)
        self.register_buffer("fleeting", torch.ones(2), persistent=False)
        self.log = []

    def forward(self, x):
        return self.again(self.norm(self.second(torch.tanh(self.first(x))))) * self.fleeting


def calls(module, args, output):
    module.log.append("called")


def tensors(net):
    return {**dict(net.named_parameters()), **dict(net.named_buffers())}


def one_step(net):
    """Give each trainable parameter a history, tied ones one."""
    new = {id(p): p * 2 for p in net.parameters() if p.requires_grad}
    for part in net.modules():
        for name, p in part._parameters.items():
            if p is not None:
                part._parameters[name] = new.get(id(p), p)


@each_row("by", MODES)
def test_a_clone_computes_alike_and_keeps_its_structure(by):
    net = Net().eval()
    net.register_forward_hook(calls)
    clone = module_clone(net, by=by)
    x = torch.randn(4, 2)
    assert torch.equal(net(x), clone(x))
    assert clone is not net
    assert clone.first is not net.first
    assert clone.again is clone.first
    assert clone.second.weight is clone.first.weight
    assert not clone.norm.weight.requires_grad
    assert not clone.norm.training
    assert clone.log == ["called"]
    assert net.log == ["called"]
    assert "fleeting" not in clone.state_dict()
    assert list(tensors(clone)) == list(tensors(net))


@each_row("by", ["reference", "ref"])
def test_a_reference_clone_shares_tensors_but_not_their_places(by):
    net = Net()
    clone = module_clone(net, by=by)
    assert all(tensors(clone)[name] is tensor for name, tensor in tensors(net).items())
    one_step(clone)
    assert isinstance(net.first.weight, nn.Parameter)
    assert net.first.weight is not clone.first.weight


@each_row("by", ["copy", "clone"])
@each_row("grad_mode", [True, False])
def test_a_copied_clone_is_connected(by, grad_mode):
    net = Net()
    with torch.set_grad_enabled(grad_mode):
        clone = module_clone(net, by=by)
    assert not isinstance(clone.first.weight, nn.Parameter)
    assert clone.first.weight.data_ptr() != net.first.weight.data_ptr()
    grads = torch.autograd.grad(clone.first.weight.sum() * 3, net.first.weight)
    assert torch.equal(grads[0], torch.full((2, 2), 3.0))


def test_a_deepcopied_clone_is_of_its_own():
    net = Net()
    one_step(net)
    net.second = nn.Linear(2, 2)
    clone = module_clone(net, by="deepcopy")
    assert type(clone.second.weight) is nn.Parameter
    assert type(clone.first.weight) is torch.Tensor
    assert type(clone.norm.weight) is nn.Parameter
    for name, tensor in tensors(clone).items():
        old = tensors(net)[name]
        assert tensor.is_leaf
        assert tensor.requires_grad == old.requires_grad
        assert tensor.data_ptr() != old.data_ptr()
        assert torch.equal(tensor, old)


def test_detached_buffers_are_not_written_by_the_clone():
    net = Net()
    before = net.norm.running_mean.clone()
    module_clone(net, by="reference", detach_buffers=True)(torch.randn(4, 2))
    assert torch.equal(net.norm.running_mean, before)
    module_clone(net, by="reference")(torch.randn(4, 2))
    assert not torch.equal(net.norm.running_mean, before)


@each_row("by", MODES)
def test_a_device_moves_everything_and_keeps_ties(by):
    clone = module_clone(Net(), by=by, device="meta")
    assert {tensor.device.type for tensor in tensors(clone).values()} == {"meta"}
    assert clone.second.weight is clone.first.weight
    state = extract_state_dict(Net(), by=by, device="meta")
    assert state.params[1]["weight"].device.type == "meta"


def test_a_recurrent_clone_computes_with_its_own_weights():
    torch.manual_seed(0)
    net, x = nn.LSTM(2, 3), torch.randn(4, 1, 2)
    clone = module_clone(net, by="copy")
    assert torch.equal(net(x)[0], clone(x)[0])
    (grad,) = torch.autograd.grad(clone(x)[0].sum(), clone.weight_ih_l0)
    assert grad.abs().sum() > 0


def test_a_clone_of_a_plain_attribute_with_a_history():
    net = nn.Linear(2, 2)
    net.derived = net.weight * 2
    clone = module_clone(net, by="copy")
    assert torch.equal(clone.derived, net.derived)
    assert clone.derived is not net.derived


def test_trees_are_cloned_leaf_by_leaf():
    leaf = torch.ones(2, requires_grad=True)
    tree = {"a": (leaf, leaf), "b": None, "c": 3}
    clone = module_clone(tree, by="copy")
    assert clone["a"][0] is clone["a"][1]
    assert clone["a"][0].grad_fn is not None
    assert (clone["b"], clone["c"]) == (None, 3)
    assert module_clone(leaf) is leaf


@each_row("by", MODES)
def test_a_snapshot_recovers_again_and_again(by):
    net = Net()
    state = extract_state_dict(net, by=by)
    want = {name: tensor.clone() for name, tensor in tensors(net).items()}
    for _ in range(2):
        one_step(net)
        recover_state_dict(net, state)
        assert all(torch.equal(tensor, want[name]) for name, tensor in tensors(net).items())
        assert net.second.weight is net.first.weight
        assert not net.norm.weight.requires_grad


def test_a_snapshot_counts_shared_modules_once_and_keeps_none():
    state = extract_state_dict(Net())
    assert len(state.params) == 4
    assert state.params[1].keys() == {"weight", "bias"}
    assert state.params[2]["bias"] is None
    assert "fleeting" in state.buffers[0]
    assert extract_state_dict(Net(), with_buffers=False).buffers == ()


def test_a_snapshot_with_detached_buffers_is_never_written():
    net = Net()
    state = extract_state_dict(net, detach_buffers=True)
    for _ in range(2):
        recover_state_dict(net, state)
        assert torch.equal(net.norm.running_mean, torch.zeros(2))
        net(torch.randn(4, 2))
        assert not torch.equal(net.norm.running_mean, torch.zeros(2))


def test_a_copied_snapshot_is_connected_to_the_module():
    net = Net()
    state = extract_state_dict(net, by="copy")
    weight = net.first.weight
    recover_state_dict(net, state)
    assert torch.equal(torch.autograd.grad(net.first.weight.sum(), weight)[0], torch.ones(2, 2))


def test_visual_contents_name_the_parameters():
    net = Net()
    state = extract_state_dict(net, by="copy", enable_visual=True, visual_prefix="step1.")
    assert state.visual_contents["step1.first.weight"] is state.params[1]["weight"]
    assert state.visual_contents["step1.second.weight"] is state.params[1]["weight"]
    assert extract_state_dict(net).visual_contents is None


@each_row("cut", [stop_gradient, module_detach_])
def test_a_module_is_cut_off_and_others_keep_their_graph(cut):
    net = Net()
    one_step(net)
    held = net.first.weight
    state = extract_state_dict(net)
    result = cut(net)
    assert result is (net if cut is module_detach_ else None)
    assert net.first.weight.is_leaf
    assert net.first.weight.requires_grad
    assert net.second.weight is net.first.weight
    assert torch.equal(net.first.weight, held)
    assert isinstance(net.norm.weight, nn.Parameter)
    assert not net.norm.weight.requires_grad
    assert state.params[1]["weight"] is held
    assert held.grad_fn is not None


def test_a_snapshot_is_cut_off():
    net = Net()
    one_step(net)
    state = extract_state_dict(net, enable_visual=True)
    assert module_detach_(state) is state
    cut = state.params[1]["weight"]
    assert cut.is_leaf
    assert cut.requires_grad
    assert state.params[2]["weight"] is cut
    assert state.visual_contents["first.weight"] is cut
    assert net.first.weight.grad_fn is not None


def test_a_tree_is_cut_off_in_place():
    leaf = torch.ones(2, requires_grad=True)
    tree = [leaf, leaf * 2, None, torch.ones(1)]
    moved = tree[1]
    assert module_detach_(tree) is tree
    assert moved.is_leaf
    assert [t.requires_grad for t in (leaf, moved, tree[3])] == [True, True, False]


def test_modules_snapshots_and_optimizers_in_a_tree_are_cut_off():
    net, other = Net(), Net()
    inner = todist.MetaSGD(net, lr=torch.tensor(0.1, requires_grad=True), momentum=0.9)
    inner.step(net.first(torch.ones(1, 2)).sum())
    one_step(other)
    snapshot = extract_state_dict(other)
    moved = 2 * net.first.weight
    stop_gradient({"net": net, "rest": (inner, [moved, snapshot], 1.0)})
    assert net.first.weight.is_leaf
    assert moved.is_leaf
    assert snapshot.params[1]["weight"].is_leaf
    assert not other.first.weight.is_leaf
    assert all(
        leaf.is_leaf
        for leaf in todist.pytree.flatten(inner.get_states())[0]
        if isinstance(leaf, torch.Tensor)
    )


def test_bad_input_is_refused():
    net = Net()
    with pytest.raises(ValueError, match=r"`by` must be one of 'reference', .*, got 'deep'"):
        module_clone(net, by="deep")
    for function in (module_clone, module_detach_, stop_gradient):
        with pytest.raises(TypeError, match=r"`target` must be a module, .*, got str"):
            function("net")
    with pytest.raises(TypeError, match="`target` must be a module or a MetaOptimizer, got list"):
        extract_state_dict([net])
    with pytest.raises(TypeError, match="`target` must be a module or a MetaOptimizer, got list"):
        recover_state_dict([net], extract_state_dict(net))
    with pytest.raises(TypeError, match="`state` must be a ModuleState to recover a module, got OrderedDict"):
        recover_state_dict(net, net.state_dict())
    with pytest.raises(ValueError, match=r"`state.params` must have the names that the module has"):
        recover_state_dict(net, extract_state_dict(nn.Linear(2, 2)))
    other = extract_state_dict(net)
    with pytest.raises(ValueError, match=r"`state.buffers` must have the names"):
        recover_state_dict(net, ModuleState(other.params, ({},) * 4))


class Holder:
    """An object of a user that holds a tensor."""

    __slots__ = ("tensor",)

    def __init__(self, tensor):
        self.tensor = tensor


@each_row("by", ["reference", "copy", "deepcopy"])
def test_tensors_in_containers_of_a_module_are_cloned_as_parameters_are(by):
    net = nn.Linear(2, 2)
    scale = torch.tensor(2.0, requires_grad=True)
    made = scale * 3  # `deepcopy` refuses it
    net.made, net.nested = [made], {"a": (made, {"b": Holder(net.weight)}), "c": partial(torch.mul, made)}
    clone = module_clone(net, by=by)
    assert clone.nested is not net.nested
    assert clone.made[0] is clone.nested["a"][0] is clone.nested["c"].args[0]
    assert clone.nested["a"][1]["b"].tensor is clone.weight
    assert (clone.made[0] is made) is (by == "reference")
    assert torch.equal(clone.made[0], made)
    if by == "deepcopy":
        assert clone.made[0].is_leaf
        assert clone.made[0].requires_grad
    else:
        assert torch.autograd.grad(clone.made[0], scale)[0].item() == 3.0


def test_parts_of_a_clone_share_what_the_module_s_parts_share():
    net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    net[0].log = net[1].log = []
    clone = module_clone(net)
    assert clone[0].log is clone[1].log
    assert clone[0].log is not net[0].log


def test_an_object_that_says_how_it_is_copied_is_not_looked_through():
    class Shared:
        def __init__(self):
            self.net = nn.Linear(1, 1)

        def __deepcopy__(self, memo):
            return self

        @property
        def __dict__(self):
            raise AssertionError("looked at")

    net = nn.Linear(1, 1)
    net.shared = [object.__new__(Shared)]
    assert module_clone(net).shared[0] is net.shared[0]


class Renamed(nn.Linear):
    def named_modules(self, *args, **kwargs):
        return ((f"{name}?", part) for name, part in super().named_modules(*args, **kwargs))


class Chosen(nn.Linear):
    def named_parameters(self, *args, **kwargs):
        yield "only", self.bias


@each_row(
    "make",
    [
        Net,
        lambda: nn.ModuleList([Net(), nn.Tanh(), nn.Sequential(nn.PReLU(), Renamed(1, 1))]),
        lambda: nn.Sequential(Net(), nn.ModuleDict({"b": nn.Linear(1, 1), "a": nn.Linear(1, 1)})),
        lambda: Chosen(1, 1),
    ],
)
def test_one_walk_finds_what_torch_finds_in_its_order(make):
    module = make()
    if isinstance(module, nn.ModuleList):
        module[2].add_module("none", None)
        module[2].add_module("again", module[0].first)
    parts, named = parts_and_parameters(module)
    assert list(map(id, parts)) == list(map(id, module.modules()))
    assert [(name, id(p)) for name, p in named.items()] == [
        (name, id(p)) for name, p in dict(module.named_parameters()).items()
    ]
