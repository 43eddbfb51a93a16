import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchopt_dist as todist
from tests.optim.programs import (
    AGAIN,
    X,
    assert_a_resumed_run_equals_an_unbroken_one,
    assert_copies_go_on_alike_and_apart,
    assert_the_graph_stays_flat,
    loss_of,
    make,
    run,
    same,
    values,
)
from tests.rows import each_row
from torchopt_dist.nn import extract_state_dict, module_clone, recover_state_dict, stop_gradient
from torchopt_dist.optim import MetaOptimizer, MetaSGD, sgd


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.decoder.weight = self.encoder.weight

    def forward(self, x):
        return self.decoder(torch.tanh(self.encoder(x)))


def test_gradients_flow_to_the_first_parameters_and_nothing_is_written():
    net = make()
    first = dict(net.named_parameters())
    before = values(net)
    run(net, MetaSGD(net, 0.1, momentum=0.9), 3)
    grads = torch.autograd.grad(loss_of(net), list(first.values()))
    assert all(grad.abs().sum() > 0 for grad in grads)
    assert all(torch.equal(p, old) for p, old in zip(first.values(), before, strict=True))
    assert not isinstance(net[0].weight, nn.Parameter)


def test_the_class_equals_the_generic_optimizer():
    one, two = make(), make()
    run(one, MetaSGD(one, 0.1, momentum=0.9), 3)
    run(two, MetaOptimizer(two, sgd(0.1, momentum=0.9)), 3)
    assert same(one, two)


def test_frozen_parameters_stay_and_may_be_thawed():
    net = make()
    net[0].weight.requires_grad_(False)
    frozen = net[0].weight
    optimizer = MetaSGD(net, 0.1, momentum=0.9)
    run(net, optimizer, 2)
    assert net[0].weight is frozen
    frozen.requires_grad_(True)
    run(net, optimizer, 1)
    assert net[0].weight is not frozen


def test_tied_weights_stay_tied_and_count_once():
    net, twin = Tied(), Tied()
    run(net, MetaSGD(net, 0.1, momentum=0.9), 3)
    assert net.encoder.weight is net.decoder.weight
    optimizer = torch.optim.SGD(twin.parameters(), 0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(twin).backward()
        optimizer.step()
    torch.testing.assert_close(net.encoder.weight.detach(), twin.encoder.weight.detach())


def test_a_parameter_without_gradient_stays_and_keeps_its_momentum():
    net = make()
    optimizer = MetaSGD(net, 0.1, momentum=0.9)
    run(net, optimizer, 2)
    weight, moment = net[0].weight, optimizer.get_states()[0][1].momentum_buffer["0.weight"]
    optimizer.step(net[2].weight.square().sum())
    assert net[0].weight is weight
    assert optimizer.get_states()[0][1].momentum_buffer["0.weight"] is moment


@each_row("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_compute_with_the_new_weights(kind):
    torch.manual_seed(0)
    net, x = kind(2, 3), torch.randn(4, 1, 2)
    before = net(x)[0].detach()
    MetaSGD(net, 1.0).step(net(x)[0].square().sum())
    after = net(x)[0]
    assert not torch.allclose(before, after)
    want = torch.func.functional_call(kind(2, 3), dict(net.named_parameters()), (x,))[0]
    torch.testing.assert_close(after, want)


def test_a_step_is_recorded_under_no_grad():
    net = make()
    first, loss = net[0].weight, loss_of(net)
    with torch.no_grad():
        MetaSGD(net, 0.1).step(loss)
    assert net[0].weight.requires_grad
    assert torch.autograd.grad(loss_of(net), first)[0].abs().sum() > 0


def test_two_modules_share_a_step():
    one, two, twin = make(), make(), make()
    optimizer = MetaSGD(one, 0.1, momentum=0.9)
    optimizer.add_param_group(two)
    for _ in range(3):
        optimizer.step(loss_of(one) + loss_of(two))
    run(twin, MetaSGD(twin, 0.1, momentum=0.9), 3)
    assert same(one, twin)
    assert same(two, twin)
    assert len(optimizer.get_states()) == 2


@each_row("way", ["stop_gradient", "recover"])
def test_the_graph_stays_flat_over_a_thousand_cut_steps(way):
    net = make()
    optimizer = MetaSGD(net, 0.01, momentum=0.9)
    assert_the_graph_stays_flat(net, optimizer, way, lambda state: state[1].momentum_buffer.values(), 1000)


def test_stop_gradient_cuts_the_optimizer_and_keeps_its_values():
    net = make()
    optimizer = MetaSGD(net, 0.1, momentum=0.9)
    run(net, optimizer, 2)
    held = optimizer.get_states()[0][1].momentum_buffer["0.weight"]
    stop_gradient(optimizer)
    cut = optimizer.get_states()[0][1].momentum_buffer["0.weight"]
    assert cut.is_leaf
    assert cut.requires_grad
    assert torch.equal(cut, held)
    assert held.grad_fn is not None


def test_a_recovered_optimizer_repeats_itself():
    net = make()
    optimizer = MetaSGD(net, 0.1, momentum=0.9, dampening=0.3)
    run(net, optimizer, 2)
    snapshot = extract_state_dict(net), extract_state_dict(optimizer, by="copy")
    run(net, optimizer, 2)
    want = values(net)
    recover_state_dict(net, snapshot[0])
    recover_state_dict(optimizer, snapshot[1])
    run(net, optimizer, 2)
    assert all(torch.equal(p, q) for p, q in zip(values(net), want, strict=True))


def test_a_resumed_run_equals_an_unbroken_one_bit_for_bit():
    assert_a_resumed_run_equals_an_unbroken_one(lambda net: MetaSGD(net, 0.1, momentum=0.9, dampening=0.3))


@each_row("again", AGAIN)
def test_copies_go_on_alike_and_apart(again):
    assert_copies_go_on_alike_and_apart(lambda net: MetaSGD(net, 0.1, momentum=0.9), again)


def test_a_cloned_optimizer_stays_connected_to_a_learned_rate():
    net, lr = make(), torch.tensor(0.1, requires_grad=True)
    other = module_clone(MetaSGD(net, lr), by="copy")
    run(other.modules[0], other, 1)
    grads = torch.autograd.grad(loss_of(other.modules[0]), [lr, net[0].weight])
    assert all(grad.abs().sum() > 0 for grad in grads)


def test_bad_input_is_refused():
    net = make()
    with pytest.raises(TypeError, match=r"`module` must be a torch.nn.Module, got list"):
        MetaSGD(list(net.parameters()), 0.1)
    with pytest.raises(ValueError, match="`module` must have parameters, got Tanh with none"):
        MetaSGD(nn.Tanh(), 0.1)
    with pytest.raises(TypeError, match="`impl` must be a GradientTransformation, got float"):
        MetaOptimizer(net, 0.1)
    optimizer = MetaSGD(net, 0.1)
    with pytest.raises(ValueError, match="must not share parameters with another group, got"):
        optimizer.add_param_group(net[0])
    with pytest.raises(ValueError, match=r"`loss` must have one element, got shape \(6, 1\)"):
        optimizer.step(net(X))
    stale = loss_of(net)
    optimizer.step(loss_of(net))
    with pytest.raises(ValueError, match="was it computed before the last step"):
        optimizer.step(stale)


def test_a_state_of_another_optimizer_is_refused():
    net = make()
    optimizer, plain = MetaSGD(net, 0.1, momentum=0.9), MetaSGD(make(), 0.1)
    with pytest.raises(ValueError, match="must be of an optimizer like this one; it lacks"):
        optimizer.load_state_dict(plain.state_dict())
    with pytest.raises(ValueError, match="`states` must have the structure of"):
        recover_state_dict(optimizer, extract_state_dict(plain))
    with pytest.raises(ValueError, match="must have 1 groups, got 0"):
        optimizer.load_state_dict({"state": []})
    with pytest.raises(TypeError, match="must be a tuple of optimizer states, got ModuleState"):
        recover_state_dict(optimizer, extract_state_dict(net))


def _net_of(kind):
    torch.manual_seed(0)
    layer = nn.LSTM(3, 4) if kind == "recurrent" else nn.Linear(3, 4)
    return nn.ModuleDict({"first": layer, "last": nn.Linear(4, 1)}).double()


def _output(net, x, kind, checkpoints):
    def hidden(x):
        if kind == "recurrent":
            return net["first"](x)[0]
        if kind == "parameters":
            return torch.tanh(nn.functional.linear(x, net["first"].weight, net["first"].bias))
        return torch.tanh(net["first"](x))

    return net["last"](checkpoint(hidden, x, use_reentrant=False) if checkpoints else hidden(x))


@each_row("called", [False, True])
@each_row("kind", ["module", "parameters", "recurrent"])
def test_a_loss_that_backward_computes_again_is_refused_where_the_step_is_recorded(kind, called):
    """Backward through the step would compute it with later parameters, and find a wrong gradient."""
    x = torch.randn(5, 3, dtype=torch.float64)
    net = _net_of(kind)
    optimizer = todist.MetaSGD(net, lr=0.1)
    before = dict(net.named_parameters())

    def loss():
        return _output(net, x, kind, True).square().mean()

    with pytest.raises(
        RuntimeError, match=r"`loss` must not be computed again.*`optimizer.run\(loss, batches\)`"
    ):
        optimizer.step(loss if called else loss())
    after = dict(net.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)

    def found(checkpoints):
        net = _net_of(kind)
        lr = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
        optimizer = todist.MetaSGD(net, lr=lr)
        for _ in range(3):
            optimizer.step(_output(net, x, kind, checkpoints).square().mean(), first_order=True)
        return torch.autograd.grad(_output(net, x, kind, False).sum(), lr)[0]

    torch.testing.assert_close(found(True), found(False), rtol=1e-12, atol=0)


def test_run_takes_a_loss_that_backward_computes_again():
    x = torch.randn(5, 3, dtype=torch.float64)

    def found(checkpoints):
        net = _net_of("module")
        lr = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
        optimizer = todist.MetaAdam(net, lr=lr)
        optimizer.run(lambda net: _output(net, x, "module", checkpoints).square().mean(), 3)
        return torch.autograd.grad(_output(net, x, "module", False).sum(), lr)[0]

    torch.testing.assert_close(found(True), found(False), rtol=1e-12, atol=0)
