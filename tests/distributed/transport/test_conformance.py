"""What every transport must do. A new one is one more row of ``TRANSPORTS``."""

from __future__ import annotations

import time
from concurrent.futures import wait

import pytest
import torch
from torch.distributed import rpc as rpc_library

import torchopt_dist as todist
from tests.distributed.programs import mlp
from torchopt_dist.distributed._caller_state import CallerState
from torchopt_dist.distributed._group import current_group
from torchopt_dist.distributed._payload import ExecutionOptions, Payload
from torchopt_dist.distributed._protocol import Call
from torchopt_dist.distributed._serialization import pack, unpack
from torchopt_dist.distributed.transport import rpc
from torchopt_dist.distributed.transport.rpc import RPCTransport

TRANSPORTS = {"rpc": lambda group: RPCTransport(group, None, rpc_library.TensorPipeRpcBackendOptions())}
"""Name → the RPC group to its transport."""


@pytest.fixture(params=TRANSPORTS)
def transport(request):
    make = TRANSPORTS[request.param]
    return lambda: make(current_group())


def request_for(function, *tasks):
    payload = Payload(
        function,
        tuple((task, {}) for task in tasks),
        (0,) * len(tasks),
        CallerState.capture(),
        ExecutionOptions(),
    )
    return pack(Call(payload, None), main_by_name=True).detached()


def ask(transport, function, *tasks, timeout=0.0):
    reply = transport.send(1, request_for(function, *tasks), timeout).result(30)
    return unpack(reply.received())


def echo(x):
    return x


def test_objects_and_tensors_come_back(world, transport):
    def body():
        for value in (
            3,
            "text",
            None,
            {"a": [1, (2.5, b"bytes")]},
            torch.randn(3, 4),
            torch.zeros(0),
            [torch.arange(5), torch.tensor(True)],
            torch.randn(1_000_000),
            torch.randn(50, 50, dtype=torch.complex128).T,
        ):
            (got,) = ask(transport(), echo, (value,)).values
            if isinstance(value, torch.Tensor):
                assert torch.equal(got, value)
            elif isinstance(value, list):
                assert all(torch.equal(a, b) for a, b in zip(got, value, strict=True))
            else:
                assert got == value

    world(2).on_zero(body)


def test_the_tasks_of_a_message_come_back_in_order(world, transport):
    assert world(2).on_zero(lambda: ask(transport(), echo, (1,), (2,), (3,)).values) == [1, 2, 3]


def test_a_module_is_rebuilt_call_after_call(world, transport):
    def body():
        carrier, model = transport(), mlp()
        for _ in range(3):
            (got,) = ask(carrier, lambda m: {k: v.detach() for k, v in m.named_parameters()}, (model,)).values
            assert all(torch.equal(got[name], p) for name, p in model.named_parameters())

    world(2).on_zero(body)


def test_the_worker_s_changes_stay_there(world, transport):
    def body():
        x = torch.zeros(100_000)
        ask(transport(), torch.Tensor.add_, (x, 1))
        assert not x.any()

    world(2).on_zero(body)


def test_an_exception_is_a_reply(world, transport):
    def body():
        failure = ask(transport(), lambda: 1 / 0, ()).exception
        return failure.kind, "ZeroDivisionError" in failure.traceback

    assert world(2).on_zero(body) == (ZeroDivisionError, True)


def test_many_requests_are_in_flight_at_once(world, transport):
    def body():
        started = time.monotonic()
        carrier = transport()
        futures = [carrier.send(1, request_for(time.sleep, (0.2,)), 0) for _ in range(40)]
        _, missing = wait(futures, timeout=5)
        assert not missing
        return time.monotonic() - started

    assert world(2).on_zero(body) < 4  # one after another they would take 8


def test_a_late_reply_is_a_timeout(world, transport):
    def body():
        carrier = transport()
        with pytest.raises(todist.CallTimeoutError, match=r"worker ?1 took longer than timeout=0\.1 s"):
            ask(carrier, time.sleep, (0.5,), timeout=0.1)
        assert ask(carrier, echo, (1,)).values == [1]

    world(2).on_zero(body)


def test_a_reply_in_time_is_none(world, transport):
    assert world(2).on_zero(lambda: ask(transport(), echo, (4,), timeout=10).values) == [4]


@pytest.mark.parametrize("step", ["from_wire", "to_wire"])
def test_a_lack_of_memory_for_a_message_on_the_worker_is_a_reply(world, transport, step):
    def refuse_heavy_ones(module):
        usual = getattr(module, step)

        def refuse(message, *known, **options):
            if b"heavy" in message.skeleton:
                raise MemoryError("no room")
            return usual(message, *known, **options)

        setattr(module, step, refuse)

    def body():
        if todist.get_rank() == 1:
            refuse_heavy_ones(rpc)
        todist.barrier()
        if todist.get_rank() == 0:
            carrier = transport()
            failure = ask(carrier, lambda: "heavy", ()).exception
            return failure.kind, failure.args, ask(carrier, echo, (1,)).values
        return None

    assert world(2).run(body)[0] == (MemoryError, ("no room",), [1])
