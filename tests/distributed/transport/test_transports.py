"""What every transport must do. A new one is one more row of ``TRANSPORTS``."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.distributed import rpc

import torchopt_dist as todist
from tests.distributed.programs import lie_right, mlp
from tests.distributed.transport.by_hand import TRANSPORTS, echo, send
from tests.processes import World
from torchopt_dist.distributed.group.group import current_group
from torchopt_dist.distributed.serialization.pickling import unpack
from torchopt_dist.distributed.serialization.wire import SMALL
from torchopt_dist.distributed.transport import shutdown
from torchopt_dist.process.future import as_completed

pytestmark = pytest.mark.processes


@pytest.fixture(params=TRANSPORTS, scope="module")
def chosen(request):
    return TRANSPORTS[request.param]


def ask(function, *tasks, timeout=0.0):
    return unpack(send(function, *tasks, timeout=timeout).result(30).received())


def objects_come_back():
    for value in (3, "text", None, {"a": [1, (2.5, b"bytes")]}, b"", "x" * 1_000_000):
        assert ask(echo, (value,)).values == [value]


def tensors_come_back():
    square = torch.randn(500, 500)
    for value in (
        torch.randn(3, 4),
        torch.zeros(0),
        torch.zeros(0, 5),
        torch.tensor(True),
        torch.arange(5),
        torch.randn(1_000_000),
        torch.randn(2_000_000)[7:],
        torch.randn(100_001).to(torch.uint8)[1:],
        square.T,
        square[:, ::2],
        square[3].expand(300, 500),
        torch.randn(2, 3, 100, 100).to(memory_format=torch.channels_last),
        torch.randn(50, 50, dtype=torch.complex128).T,
        torch.randn(300, 300, dtype=torch.complex64).conj(),
        torch.randn(5, dtype=torch.complex64).imag,
        torch.randn(7).bfloat16(),
        torch.randn(100_000).bfloat16(),
        torch.randn(100_000).half(),
        torch.randn(10, 10).to(torch.float8_e5m2),
    ):
        (got,) = ask(echo, (value,)).values
        assert (got.shape, got.dtype) == (value.shape, value.dtype)
        assert torch.equal(got.to(torch.complex128), value.to(torch.complex128))
        got.zero_()  # it can be written
        sent = torch.randn(9), [value, value], {"x": value}
        back = ask(echo, (sent,)).values[0]
        assert torch.equal(back[0], sent[0])
        assert back[1][0] is back[1][1] is back[2]["x"]


class Scaled(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.register_buffer("shift", torch.ones(size))

    def forward(self, x):
        return self.weight * x + self.shift


def lies_right(grad):
    assert lie_right(grad)


def scaled(module, *factors):
    tensors = *factors, *module.state_dict().values()
    assert lie_right(*tensors)
    out = module(sum(factors))
    out.register_hook(lies_right)
    return out


def received_tensors_lie_at_64_bytes():
    """As arguments, results and gradients, in modules, and where they are kept; the sender's may lie anywhere."""
    for size in (3, 1000, SMALL // 4 + 1, 300_001):
        x, value = torch.ones(size + 1)[1:].requires_grad_(), torch.ones(size + 1)[1:]
        module = Scaled(size)
        handle = todist.put(value)
        mirror = todist.mirror(module, torch.optim.SGD(module.parameters(), lr=0.1))
        for given in (module, mirror):
            out = todist.remote_call(scaled, 1, given, x, value, handle)
            gradients = torch.autograd.grad(
                out.square().sum(), [x, *([module.weight] if given is module else [])]
            )
            assert lie_right(out, *gradients)


def the_tasks_of_a_message_come_back_in_order():
    assert ask(echo, (1,), (2,), (3,)).values == [1, 2, 3]


def a_module_is_rebuilt_call_after_call():
    model = mlp()
    for _ in range(3):
        (got,) = ask(lambda m: {k: v.detach() for k, v in m.named_parameters()}, (model,)).values
        assert all(torch.equal(got[name], p) for name, p in model.named_parameters())


def the_worker_s_changes_stay_there():
    x = torch.zeros(100_000)
    ask(torch.Tensor.add_, (x, 1))
    assert not x.any()


def an_exception_is_a_reply():
    failure = ask(lambda: 1 / 0, ()).exception
    assert failure.kind is ZeroDivisionError
    assert "ZeroDivisionError" in failure.traceback


def an_exit_is_a_reply():
    for code in (0, 1, "words"):
        with pytest.raises(todist.RemoteError, match="SystemExit"):
            todist.remote_call(sys.exit, 1, code)
    assert todist.remote_call(echo, 1, 1) == 1


def what_cannot_be_sent_back_is_an_error():
    with pytest.raises(todist.errors.SerializationError, match="lock"):
        todist.remote_call(threading.Lock, 1)


def many_requests_are_in_flight_at_once():
    release = secrets.token_hex(8)
    futures = [send(wait_for_release, (release,)) for _ in range(40)]
    ask(release_all, (release,))
    assert {*as_completed(futures, 30)} == {*futures}


def wait_for_release(name):
    assert released.setdefault(name, threading.Event()).wait(30)


def release_all(name):
    released.setdefault(name, threading.Event()).set()


released: dict[str, threading.Event] = {}


def a_late_reply_is_a_timeout():
    release = secrets.token_hex(8)
    with pytest.raises(todist.CallTimeoutError, match=r"worker ?1 took longer than timeout=0\.1 s"):
        ask(wait_for_release, (release,), timeout=0.1)
    ask(release_all, (release,))
    assert ask(echo, (1,)).values == [1]


def many_short_calls():
    """After them, a thread that receives may keep that role while it handles a message."""
    for _ in range(30):
        ask(echo, (1,))


def replies_come_in_another_order_to_those_who_wait():
    many_short_calls()
    names = [secrets.token_hex(8) for _ in range(8)]
    got: list[str] = []
    threads = [
        threading.Thread(target=lambda name=name: (ask(wait_for_release, (name,)), got.append(name)))
        for name in names
    ]
    for thread in threads:
        thread.start()
    for name, thread in reversed([*zip(names, threads, strict=True)]):
        ask(release_all, (name,))
        thread.join(30)
    assert got == names[::-1]


def calls_are_nested_after_short_ones():
    for _ in range(3):
        many_short_calls()
        assert todist.remote_call(nested, 1, 3) == [1, 0, 1, 0]


def one_who_is_interrupted_leaves_the_others():
    many_short_calls()
    mine, other = secrets.token_hex(8), secrets.token_hex(8)
    waits = send(wait_for_release, (other,))
    main = threading.main_thread()

    def interrupt():
        ask(wait_until_waited_for, (mine,))
        signal.pthread_kill(main.ident, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            todist.remote_call(wait_for_release, 1, mine)
    finally:
        thread.join(30)
        signal.signal(signal.SIGINT, before)
    ask(release_all, (mine,))
    ask(release_all, (other,))
    assert unpack(waits.result(30).received()).exception is None


def wait_until_waited_for(name):
    deadline = time.monotonic() + 30
    while name not in released:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def a_reply_in_time_is_no_timeout():
    assert ask(echo, (4,), timeout=10).values == [4]


def gradients_of_order_1_and_2():
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)

    def remote(x, weight):
        return todist.remote_call(lambda x, w: ((x @ w).sin() * x, w.exp()), 1, x, weight)

    assert gradcheck(remote, (x, weight))
    assert gradgradcheck(remote, (x, weight))


def gradients_of_a_large_tensor():
    x = torch.randn(300, 300, requires_grad=True)
    (todist.remote_call(torch.Tensor.pow, 1, x, 3)).sum().backward()
    torch.testing.assert_close(x.grad, 3 * x.detach() ** 2)


def nested(depth):
    rank = todist.get_rank()
    return [rank, *(todist.remote_call(nested, 1 - rank, depth - 1) if depth else [])]


def calls_can_be_nested_deeply():
    assert todist.remote_call(nested, 1, 40) == [(1 + i) % 2 for i in range(41)]


class AsksWhileItIsRebuilt:
    def __reduce__(self):
        return todist.remote_call, (echo, 1, "asked")


def a_result_asks_while_it_is_rebuilt():
    assert todist.remote_call(AsksWhileItIsRebuilt, 1) == "asked"


def calls_may_be_asynchronous():
    futures = [todist.remote_async_call(echo, args=(i,), partitioner=1) for i in range(20)]
    assert [future.wait() for future in futures] == [[i] for i in range(20)]


def calls_may_come_from_threads():
    got = {}

    def work(number):
        x = torch.full((10 ** (number % 6),), float(number), requires_grad=True)
        todist.remote_call(torch.Tensor.square, 1, x).sum().backward()
        got[number] = bool((x.grad == 2 * number).all())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert got == dict.fromkeys(range(24), True)


def all_graphs_are_released():
    x = torch.randn(3, requires_grad=True)
    for _ in range(5):
        todist.remote_call(torch.Tensor.square, 1, x)
    deadline = time.monotonic() + 20
    while todist.remote_call(lambda: len(current_group().kept_graphs), 1):
        assert time.monotonic() < deadline


CHECKS = (
    objects_come_back,
    tensors_come_back,
    received_tensors_lie_at_64_bytes,
    the_tasks_of_a_message_come_back_in_order,
    a_module_is_rebuilt_call_after_call,
    the_worker_s_changes_stay_there,
    an_exception_is_a_reply,
    an_exit_is_a_reply,
    what_cannot_be_sent_back_is_an_error,
    many_requests_are_in_flight_at_once,
    replies_come_in_another_order_to_those_who_wait,
    calls_are_nested_after_short_ones,
    one_who_is_interrupted_leaves_the_others,
    a_late_reply_is_a_timeout,
    a_reply_in_time_is_no_timeout,
    gradients_of_order_1_and_2,
    gradients_of_a_large_tensor,
    calls_can_be_nested_deeply,
    a_result_asks_while_it_is_rebuilt,
    calls_may_be_asynchronous,
    calls_may_come_from_threads,
    all_graphs_are_released,
)


@pytest.fixture(scope="module")
def errors(chosen):
    """What the checks have raised, by name; all are made in one group."""

    def body():
        raised = {}
        for check in CHECKS:
            try:
                check()
            except Exception as error:
                raised[check.__name__] = error
        return raised

    return World(2, env=chosen).on_zero(body)


@pytest.mark.every_row
@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_the_conformance(errors, check):
    if check in errors:
        raise errors[check]


@pytest.mark.parametrize("step", ["from_wire", "to_wire"])
def test_a_lack_of_memory_for_a_message_on_the_worker_is_a_reply(world, chosen, step):
    def refuse_heavy_ones(module):
        usual = getattr(module, step)

        def refuse(message, **options):
            skeleton, *_ = message.content if step == "from_wire" else [message.skeleton]
            if b"heavy" in skeleton:
                raise MemoryError("no room")
            return usual(message, **options)

        setattr(module, step, refuse)

    def body():
        if todist.get_rank() == 1:
            refuse_heavy_ones(sys.modules[type(current_group().transport).__module__])
        todist.barrier()
        if todist.get_rank() == 0:
            failure = ask(lambda x: ("heavy", x), (torch.ones(1),)).exception
            return failure.kind, failure.args, ask(echo, (1,)).values
        return None

    assert world(2, env=chosen).run(body)[0] == (MemoryError, ("no room",), [1])


def test_a_lack_of_memory_for_a_message_of_the_caller_leaves_no_request(world, chosen):
    """At the end, the group would wait for its reply."""

    def body():
        module = sys.modules[type(current_group().transport).__module__]
        usual = module.to_wire

        def refuse(message, **options):
            if b"heavy" in message.skeleton:
                raise MemoryError("no room")
            return usual(message, **options)

        module.to_wire = refuse
        x = torch.ones(1, requires_grad=True)
        with pytest.raises(MemoryError, match="no room"):
            todist.remote_sync_call(lambda x: ("heavy", x), args=(x,), partitioner=1)
        until = time.monotonic() + 20  # the release of the graph is answered soon
        while todist.status()[0].requests:
            assert time.monotonic() < until
        return todist.remote_call(float, 1, x)

    assert world(2, env=chosen).on_zero(body) == 1.0


def test_a_worker_that_dies_in_a_call_is_lost_and_the_others_go_on(chosen):
    def main():
        if todist.get_rank() == 0:
            with pytest.raises(todist.WorkerLostError, match="worker1"):
                todist.remote_call(os._exit, 1, 3)
            with pytest.raises(todist.WorkerLostError, match="worker1"):
                todist.remote_call(echo, 1, 3)
            return todist.remote_call(echo, 2, "here")
        return None

    endings = World(3, env=chosen, rpc=False).endings(
        todist.auto_init_rpc(on_loss="continue")(main), timeout=60
    )
    assert [(ending.value, ending.exitcode) for ending in endings] == [("here", 0), (None, 3), (None, 0)]


def test_calls_that_are_never_answered_do_not_keep_the_program(chosen):
    def main():
        shutdown.SHUTDOWN_SECONDS = 0.3
        if todist.get_rank() == 0:
            send(wait_for_release, ("never",))

    def body():
        expected = pytest.warns(RuntimeWarning, match="calls to worker1 were not answered")
        with expected if int(os.environ["RANK"]) == 0 else contextlib.nullcontext():
            todist.auto_init_rpc()(main)()
        return True

    assert World(2, env=chosen, rpc=False).run(body, timeout=60) == [True, True]


@pytest.mark.torch_rpc
def test_bad_choices(monkeypatch):
    with pytest.raises(ValueError, match="transport must be 'auto' or 'rpc' or 'zmq', got 'mpi'"):
        todist.auto_init_rpc(transport="mpi")
    main = todist.auto_init_rpc(transport="zmq")(todist.get_rank)
    assert main() == 0
    for settings in ({"backend": rpc.BackendType.TENSORPIPE}, {"rpc_backend_options": object()}):
        with pytest.raises(
            todist.errors.InitializationError, match=f"{next(iter(settings))} is for torch's RPC"
        ):
            todist.auto_init_rpc(transport="zmq", **settings)(todist.get_rank)()
    assert (
        todist.auto_init_rpc(transport="zmq")(todist.auto_init_rpc(transport="auto")(todist.get_rank))() == 0
    )
    with pytest.raises(todist.errors.InitializationError, match="asks for another transport: 'rpc'"):
        todist.auto_init_rpc(transport="zmq")(todist.auto_init_rpc(transport="rpc")(todist.get_rank))()
    monkeypatch.setenv("TODIST_TRANSPORT", "mpi")
    with pytest.raises(
        todist.errors.InitializationError, match="TODIST_TRANSPORT must be auto or rpc or zmq, got 'mpi'"
    ):
        todist.auto_init_rpc()(todist.get_rank)()
    assert main() == 0
    monkeypatch.delitem(sys.modules, "torchopt_dist.distributed.transport.zmq")
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(
        todist.errors.InitializationError, match=r"needs pyzmq.*pip install 'torchopt_dist\[zmq\]'"
    ):
        main()


@pytest.mark.torch_rpc
def test_remote_references_need_torch_s_rpc():
    with pytest.raises(todist.errors.NotInitializedError, match="transport is 'rpc'"):
        todist.auto_init_rpc(transport="zmq")(lambda: todist.pytree.tree_as_rref([1]))()


@pytest.mark.torch_rpc
def test_with_zmq_nothing_of_torch_s_rpc_is_open(world):
    def listening():
        with pytest.raises(RuntimeError, match="not been initialized"):
            rpc.get_worker_info()
        assert todist.remote_call(echo, 1 - todist.get_rank(), 1) == 1
        todist.barrier()
        return sum(c.status == psutil.CONN_LISTEN for c in psutil.Process().net_connections("inet"))

    # Rank 0 has the membership's port. The store's is closed, or a worker would look for the next group there.
    assert world(2, env=TRANSPORTS["zmq"]).run(listening) == [1, 0]
    assert world(2, env=TRANSPORTS["zmq over TCP"]).run(listening) == [2, 1]


def test_no_folder_stays_where_a_rank_fails(tmp_path):
    def main():
        rank = todist.get_rank()
        (tmp_path / str(rank)).write_text(current_group().transport._mesh._links[rank].contact.path)
        todist.barrier()
        if rank == 1:
            raise KeyError("here")
        while True:  # Python, in which an error can be raised
            pass

    endings = World(2, env=TRANSPORTS["zmq"], rpc=False).endings(todist.auto_init_rpc()(main), timeout=60)
    assert isinstance(endings[1].error, KeyError)
    folders = [Path((tmp_path / rank).read_text()).parent for rank in ("0", "1")]
    assert [folder.name.startswith("todist-") for folder in folders] == [True, True]
    assert [folder.exists() for folder in folders] == [False, False]
