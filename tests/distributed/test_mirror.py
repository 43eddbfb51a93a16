"""``todist.mirror``: steps that workers take themselves are those that rank 0 would take; nothing travels for them."""

from __future__ import annotations

import gc
import io
import os
import signal
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchopt_dist as todist
from torchopt_dist.distributed.mirror import _chosen
from torchopt_dist.errors import ResidentError, SerializationError, WorkerLostError

pytestmark = pytest.mark.filterwarnings("ignore:.*has changed buffers of its arguments:UserWarning")

OPTIMIZERS = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "ours": lambda parameters: todist.Adam(parameters, lr=todist.schedule.linear_schedule(0.01, 0.001, 4)),
}


class Net(nn.Module):
    """With a learned rate, a frozen parameter, one that a task may use, one that none uses, and buffers."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
        self.rate = nn.Parameter(torch.tensor(0.1))
        self.sometimes = nn.Parameter(torch.tensor(0.2))
        self.never = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.tensor(2.0), requires_grad=False)

    def forward(self, x):
        return self.frozen * self.body(x)


def task_loss(net, x, y, index, scale):
    """Two inner steps at a learned rate, and a gradient penalty."""
    weights = dict(net.named_parameters())
    trained = {name: p for name, p in weights.items() if name.startswith("body") and p.requires_grad}
    for _ in range(2):
        loss = F.mse_loss(torch.func.functional_call(net, {**weights, **trained}, (x[:5],)), y[:5])
        grads = torch.autograd.grad(loss, list(trained.values()), create_graph=True)
        trained = {n: p - net.rate * g for (n, p), g in zip(trained.items(), grads, strict=True)}
    loss = F.mse_loss(torch.func.functional_call(net, {**weights, **trained}, (x[5:],)), y[5:])
    if index == 1:
        loss = loss * net.sometimes
    return loss * scale + 0.1 * sum((grad**2).sum() for grad in grads)


spread = todist.parallelize(todist.tasks, todist.mean_reducer)(task_loss)


def new(kind="Adam", seed=0):
    torch.manual_seed(seed)
    net = Net().double()
    return net, OPTIMIZERS[kind](net.parameters())


def batch(step, tasks=6):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(tasks, 10, 3, dtype=torch.double, generator=generator)
    return x, x.sum(-1, keepdim=True).sin(), torch.arange(tasks)


def clip(module):
    nn.utils.clip_grad_norm_(module.parameters(), 0.5)


def train(kind, replicated, mixed, fan_out=None):
    """Steps of many kinds; returns all numbers on the way, and the copies of the workers.

    Only ``mixed`` ones have gradients that more than one call has left, or this process.
    """
    net, optimizer = new(kind)
    meta = todist.mirror(net, optimizer) if replicated else net
    scale = torch.tensor(1.5, dtype=torch.double, requires_grad=True)
    losses = []
    spread = todist.parallelize(todist.tasks, todist.mean_reducer, fan_out=fan_out)(task_loss)

    def step(before=None):
        if replicated:
            meta.step(before)
            return
        if before is not None:
            before(net)
        optimizer.step()

    def loss_of(number, model=meta):
        losses.append(spread(model, *batch(number), scale))
        return losses[-1]

    for number in range(2):
        meta.zero_grad()
        loss_of(number).backward()
        step(clip)
    net.eval()
    for group in optimizer.param_groups:
        if kind != "ours":
            group["lr"] *= 0.5
    # Of two calls, one of them with the module itself, a term of this process, and the gradients of the step before.
    if mixed:
        (loss_of(2) + loss_of(3, net) + sum((p**2).sum() for p in net.body.parameters())).backward()
        loss_of(4).backward()
        step()
    norms = [p.grad.norm() for p in net.parameters() if p.grad is not None]
    meta.zero_grad()
    net.body[0].bias.requires_grad_(False)
    loss = loss_of(5)
    (grad,) = torch.autograd.grad(loss, scale, create_graph=True)
    ((loss if mixed else 0) + grad**2).backward()
    step()
    loss_of(6).backward()
    meta.zero_grad()
    loss_of(7).backward()
    step()
    found = [*losses, *norms, scale.grad, *net.parameters(), *net.buffers()]
    elsewhere = (
        [todist.remote_call(held, r, meta) for r in range(todist.get_world_size())] if replicated else []
    )
    return torch.cat([tensor.detach().reshape(-1) for tensor in found]), elsewhere


def held(module):
    return torch.cat([tensor.detach().reshape(-1) for tensor in module.parameters()])


@pytest.mark.parametrize(("size", "transport"), [(1, None), (2, None), (3, "zmq")])
def test_the_numbers_are_those_of_steps_on_rank_0(world, size, transport):
    def body():
        for kind in OPTIMIZERS if size == 2 else ["Adam"]:
            for mixed in (False, True):
                expected, _ = train(kind, False, mixed)
                found, copies = train(kind, True, mixed, fan_out=1)  # a tree from three workers on
                if size == 1 or (size == 2 and not mixed):  # the sum of two has one order
                    assert torch.equal(found, expected), kind
                torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
                for copy in copies[1:]:
                    assert torch.equal(copy, copies[0]), kind

    world(size).on_zero(body, transport=transport, timeout=60)


def plain_loss(net, x):
    return net(x).square().mean()


def test_neither_parameters_nor_gradients_travel_and_copies_go_with_the_mirror(world):
    def body(fan_out):
        net = nn.Linear(512, 512)
        everywhere = todist.parallelize(todist.batch_partitioner, todist.mean_reducer, fan_out=fan_out)(
            plain_loss
        )
        x = torch.arange(3 * 512).view(3, 512) / 999
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        meta = todist.mirror(net, optimizer)
        traffic = []
        for model, step in ((net, optimizer.step), (meta, meta.step)):
            everywhere(model, x)
            with todist.profile() as profile:
                everywhere(model, x).backward()
                step()
            assert bool(fan_out) == any((s.worker, s.phase, s.peer) == (1, "send", 2) for s in profile.spans)
            own = {todist.get_rank(), None}
            traffic.append(
                sum(s.size for s in profile.spans if s.worker != s.peer and not {s.worker, s.peer} <= own)
            )
            if model is net:
                meta.sync()
        size = 512 * 513 * 4
        assert 4 * size < traffic[0] < 4 * size + 50_000, fan_out
        assert traffic[1] < 50_000
        status = todist.status()
        assert [(w.residents, w.resident_bytes) for w in status] == [(1, size)] * 3
        del meta, model, step
        gc.collect()
        while any(w.residents for w in todist.status()):  # the request to forget it is on its way
            pass
        assert all(w.kept_graphs == 0 for w in todist.status())

    world(3).on_zero(lambda: [body(fan_out) for fan_out in (None, 1)], timeout=60)


@pytest.mark.parametrize("fan_out", [None, 1])
def test_some_workers_may_be_given_the_mirror_and_others_the_module(world, fan_out):
    def body():
        stepped = []
        for replicated in (True, False):
            torch.manual_seed(0)
            net = nn.Linear(300, 300).double()  # whose weight goes down a tree in chunks
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            meta = todist.mirror(net, optimizer) if replicated else net

            def shares(x, meta=meta, net=net):
                return [
                    (1, (net, x), {}),
                    (2, (meta, 2 * x), {}),
                    (0, (meta, 3 * x), {}),
                    (3, (net, 4 * x), {}),
                ]

            call = todist.parallelize(shares, todist.mean_reducer, fan_out=fan_out)(plain_loss)
            call(torch.arange(300.0).double().div(300)).backward()
            (meta if replicated else optimizer).step()
            stepped.append(held(net))
        torch.testing.assert_close(*stepped)

    world(4).on_zero(body, timeout=60)


def changes(module):
    with torch.no_grad():
        module.never.add_(1)
    return module.never.sum()


def sparse_loss(module, x):
    return module(x).sum()


@dataclass
class Fatal:
    """A function that kills a worker where it arrives there."""

    rank: int

    def __call__(self, module):
        pass

    def __setstate__(self, state):
        self.rank = state["rank"]
        if todist.get_rank() == self.rank:
            os.kill(os.getpid(), signal.SIGKILL)


def test_what_is_wrong_is_said_and_mended(world):
    def body():
        net, optimizer = new()
        meta = todist.mirror(net, optimizer)
        saved = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
        saved = torch.load(_saved(saved))
        loss = spread(meta, *batch(0), 1.0)
        with pytest.raises(RuntimeError, match=r"torch.autograd.grad was asked for gradients of a mirror's"):
            torch.autograd.grad(loss, net.rate)
        meta.zero_grad()
        spread(meta, *batch(0), 1.0).backward()
        meta.step()
        net.load_state_dict(saved["net"])
        for use in (lambda: spread(meta, *batch(0), 1.0), meta.step):
            with pytest.raises(ResidentError, match=r"a parameter of shape \(\), was changed in place here"):
                use()
        optimizer.load_state_dict(saved["optimizer"])
        meta.sync()
        meta.zero_grad()
        spread(meta, *batch(0), 1.0).backward()
        meta.step()
        again, other = new()
        meta_again = todist.mirror(again, other)
        spread(meta_again, *batch(0), 1.0).backward()
        meta_again.step()
        assert torch.equal(held(net), held(again))

        todist.remote_call(changes, 1, meta)
        message = r"a parameter of shape \(2,\) of this worker's copy of a mirror was changed in place"
        for use in (lambda: todist.remote_call(held, 1, meta), meta.step):
            with pytest.raises(ResidentError, match=message) as caught:
                use()
            assert caught.value.worker == "worker1"
        meta.sync()
        meta.step()

        with pytest.raises(TypeError, match="mirror takes a module, got MirroredModule"):
            todist.mirror(meta, optimizer)
        with pytest.raises(TypeError, match=r"torch.optim.Optimizer, got str"):
            todist.mirror(net, "Adam")
        stranger = torch.optim.SGD([net.rate, torch.ones(7, requires_grad=True)], lr=0.1)
        with pytest.raises(
            ValueError, match=r"param_groups\[0\].*shape \(7,\) that is no parameter of the module"
        ):
            todist.mirror(net, stranger)
        with pytest.raises(ValueError, match=r'backend must be "gloo", "nccl" or None, got \'mpi\''):
            todist.mirror(net, optimizer, backend="mpi")
        with pytest.raises(
            ValueError, match='"gloo" or None where workers have their copies not on a GPU, got "nccl" for'
        ):
            todist.mirror(net, optimizer, backend="nccl")
        with pytest.raises(
            ValueError, match="timeout must be a positive number of seconds, up to a million, got 0"
        ):
            todist.mirror(net, optimizer, timeout=0)
        with pytest.raises(TypeError, match="before must be a function of the module, got int"):
            meta.step(3)
        with pytest.raises(
            SerializationError, match=r"`held` takes tensors that require grad.*torch.func transform"
        ):
            torch.func.vmap(lambda x: x + todist.remote_call(held, 1, meta).sum())(torch.ones(2))
        with pytest.raises(ValueError, match=r"`plain_loss` is called with a mirror.*leave out retries"):
            todist.remote_sync_call(plain_loss, args=(meta, torch.ones(2, 3)), partitioner=1, hedge_after=9.0)
        words = nn.Embedding(4, 2, sparse=True)
        sparse = todist.mirror(words, torch.optim.SparseAdam(words.parameters()))
        todist.remote_call(sparse_loss, 1, sparse, torch.tensor([1])).backward()
        with pytest.raises(ValueError, match="no sparse gradients: give the embedding sparse=False"):
            sparse.step()
        meta.close()
        with pytest.raises(ResidentError, match="a mirror was used after its end"):
            todist.remote_call(held, 1, meta)

    world(2).on_zero(body, timeout=60)


def _saved(content):
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return file


def test_the_loss_of_a_worker_in_a_step_ends_the_mirror_and_not_the_program(world):
    def body():
        net, optimizer = new()
        meta = todist.mirror(net, optimizer, timeout=5)
        spread(meta, *batch(0), 1.0).backward()
        before = held(net)
        with pytest.raises((WorkerLostError, RuntimeError)):
            meta.step(Fatal(2))
        assert torch.equal(held(net), before)
        for use in (meta.step, meta.sync, lambda: todist.remote_call(held, 1, meta)):
            with pytest.raises(WorkerLostError, match="worker2"):
                use()
        meta.close()
        again = todist.mirror(net, optimizer)
        meta.zero_grad()
        workers = todist.dim_partitioner(0, exclusive=True, keepdim=False, workers=todist.alive())
        losses = todist.remote_sync_call(
            task_loss, args=(again, *batch(0), todist.replicated(1.0)), partitioner=workers
        )
        sum(losses).backward()
        again.step()
        copies = [todist.remote_call(held, rank, again) for rank in (0, 1, 3)]
        assert torch.equal(copies[0], copies[1])
        assert torch.equal(copies[0], copies[2])
        assert not torch.equal(copies[0], before)

    endings = world(4).endings(
        lambda: body() if todist.get_rank() == 0 else None, on_loss="continue", timeout=60
    )
    for ending in endings:
        if ending.rank != 2:
            assert ending.error is None, ending.trace
            assert ending.exitcode == 0


def test_nccl_is_for_workers_that_share_no_gpu(monkeypatch):
    def chosen(backend, *gpus):
        return _chosen(backend, {f"worker{rank}": gpu for rank, gpu in enumerate(gpus)})

    for there, name in ((True, "nccl"), (False, "gloo")):
        monkeypatch.setattr("torch.distributed.is_nccl_available", lambda there=there: there)
        assert chosen(None, "GPU a", "GPU b") == name
        assert (
            chosen(None, "GPU a", "GPU a")
            == chosen(None, "GPU a", None)
            == chosen(None, None, None)
            == "gloo"
        )
    assert chosen("gloo", "GPU a", "GPU b") == "gloo"
    assert chosen("nccl", "GPU a", "GPU b") == "nccl"
    with pytest.raises(ValueError, match='copies on one GPU, got "nccl" for worker1, worker2'):
        chosen("nccl", "GPU a", "GPU b", "GPU b")
    with pytest.raises(ValueError, match='copies not on a GPU, got "nccl" for worker1'):
        chosen("nccl", "GPU a", None, "GPU a")
