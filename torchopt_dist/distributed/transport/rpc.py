"""``torch.distributed.rpc`` over TensorPipe: a request is one message, and so is its reply."""

from __future__ import annotations

import uuid
import warnings
from typing import Any, TypeAlias

import torch
from torch.distributed import rpc

from torchopt_dist.distributed.messages.message import Message
from torchopt_dist.distributed.rendezvous import store as store_module
from torchopt_dist.distributed.rendezvous.sealed_store import SealedStore
from torchopt_dist.distributed.serialization.pickling import error_reply
from torchopt_dist.distributed.serialization.wire import (
    WireMessage,
    from_wire,
    is_skeleton,
    to_wire,
)
from torchopt_dist.distributed.transport import shutdown
from torchopt_dist.distributed.transport.base import Host, Transport
from torchopt_dist.distributed.transport.pending import disconnected, late
from torchopt_dist.errors import NotInitializedError
from torchopt_dist.process.future import Future
from torchopt_dist.process.network import check_loopback
from torchopt_dist.process.resources import usable_cores
from torchopt_dist.torch_private import set_default_rpc_timeout, tensorpipe_options_with_sockets

__all__ = ["RPCTransport", "default_options", "rpc_is_initialized"]

VERDICT_SECONDS = 0.5
"""How long a broken connection waits for the membership to tell why."""

MAX_SHARED_MEMORY_WORKERS = 32
"""Beyond so many workers on one machine TensorPipe's shared-memory transport fails at the start.

Shared memory is also polled: each worker keeps two thirds of a core busy even when it waits (measured on torch 2.13). A
small message takes a third of the time that it takes over sockets, but where there are fewer than two cores a worker,
the polling slows down what the workers compute. So sockets are used there, too, and where a worker is alone on its
machine.
"""

_Fields: TypeAlias = tuple[Any, ...]
"""Of a :class:`WireMessage`; or its skeleton, if that is all."""


_answering: list[RPCTransport] = []
"""The transport that answers requests here, if there is one: torch finds a function, not an object."""


class RPCTransport(Transport):
    """Sends requests by ``rpc_async``, and answers those that arrive so."""

    def __init__(self, host: Host, backend: rpc.BackendType | None, options: rpc.RpcBackendOptions) -> None:
        super().__init__(host)
        self._backend = backend
        self._options = options
        self._device_maps = getattr(options, "device_maps", {})

    def start(self, store: SealedStore, timeout: float) -> None:
        """See :class:`~torchopt_dist.distributed.transport.base.Transport`."""
        if len(self._host.names) == 1:
            check_loopback("127.0.0.1")
        # The options' time-out bounds the waits of the start as well, and 0 would end these at once.
        options, asked = self._options, (self._options.init_method, self._options.rpc_timeout)
        options.rpc_timeout = timeout
        _answering[:] = [self]
        names, rank = self._host.names, self._host.rank
        try:
            with (
                store_module.init_url(uuid.uuid4().hex, store.plain) as options.init_method,
                warnings.catch_warnings(),
            ):
                warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)  # torch's own doing
                rpc.init_rpc(names[rank], self._backend, rank, len(names), options)
        finally:
            options.init_method, options.rpc_timeout = asked
        set_default_rpc_timeout(self._host.call_timeout)

    def stop(self, *, in_order: bool, code: int | None = None) -> None:
        """See :class:`~torchopt_dist.distributed.transport.base.Transport`."""
        if in_order:
            shutdown.shut_down_in_order(self._host.membership)
        elif rpc_is_initialized():  # in order, RPC would wait for answers
            shutdown.shut_down_at_once(code)
        _answering.clear()

    def send(self, worker: int, request: Message, timeout: float) -> Future[Message]:
        """See :class:`~torchopt_dist.distributed.transport.base.Transport`."""
        # An error here, such as a lack of memory, leaves nothing to wait for.
        fields = _fields(request, direct=self._sends_directly_to(worker))
        future = self._pending.add(worker)
        self._host.membership.watch(worker)
        failure = self._host.membership.failures.get(worker)
        if failure is not None:
            self.worker_lost(worker, failure.error())
        else:
            self._start(worker, fields, timeout, future, request.function)
        return future

    def to(self, worker: int) -> RPCTransport:
        """See :class:`~torchopt_dist.distributed.transport.base.Transport`; there is never another process."""
        del worker
        return self

    def worker_replaced(self, worker: int, incarnation: int) -> None:
        """See :class:`~torchopt_dist.distributed.transport.base.Transport`; TensorPipe refuses a name that it knows."""
        raise NotImplementedError(worker, incarnation)

    def _sends_directly_to(self, worker: int) -> bool:
        """Whether tensors on a GPU can be sent as they are: the options have a device map for that worker."""
        return bool(self._device_maps.get(self._host.names[worker]))

    def _start(
        self, worker: int, fields: _Fields, timeout: float, future: Future[Message], name: str
    ) -> None:
        def arrived(done: torch.futures.Future[_Fields]) -> None:
            reason = ""
            try:
                reply = done.value()
            except Exception as error:
                reason = str(error) or type(error).__name__
            if reason:  # outside of `except`, or users would see torch's exception as well
                self._failed(worker, reason, timeout, future, name)
                return
            try:
                future.set_result(_message(reply))
            except Exception as error:  # of this process, such as a lack of memory: the connection is whole
                future.set_exception(error)

        try:
            sent = rpc.rpc_async(self._host.names[worker], _answer_request, fields, timeout=timeout)
        except RuntimeError as error:
            reason = str(error) or type(error).__name__
        else:
            sent.add_done_callback(arrived)
            return
        self._failed(worker, reason, timeout, future, name)

    def _failed(self, worker: int, reason: str, timeout: float, future: Future[Message], name: str) -> None:
        """Settle the future with the exception for the text of an error of torch's RPC, in a call of this name."""
        member = self._host.members[worker]
        if "RPC ran for more than set timeout" in reason:
            future.set_exception(late(name, member.name, timeout))
            return
        broken = disconnected(member, reason.partition("\n")[0])

        def work() -> None:  # if the worker has died, the membership is about to say so
            future.set_exception(self._host.membership.why_lost(worker, VERDICT_SECONDS) or broken)

        self._host.threads.run(work)

    def answer(self, fields: _Fields) -> torch.futures.Future[_Fields]:
        """On the worker: answer in a thread of the group."""
        future: torch.futures.Future[_Fields] = torch.futures.Future()

        def work() -> None:
            answer, used_up = self._answer_to(fields)
            future.set_result(answer)
            del used_up  # a graph, which is freed only now

        self._host.threads.run(work)
        return future

    def _answer_to(self, fields: _Fields) -> tuple[_Fields, Any]:
        """The answer, and what is to be freed when it has been sent."""
        used_up = None
        try:
            reply = self._host.answer(_message(fields))
            used_up = reply.used_up
            return _fields(reply), used_up
        except BaseException as error:  # whatever was raised, the caller waits for an answer
            return _fields(error_reply(error)), used_up


def _fields(message: Message, *, direct: bool = False) -> _Fields:
    """What torch's RPC pickles of a message."""
    return (message.skeleton,) if is_skeleton(message) else tuple(to_wire(message, direct=direct))


def _message(fields: _Fields) -> Message:
    """The inverse of :func:`_fields`."""
    return Message(fields[0], [], [], []) if len(fields) == 1 else from_wire(WireMessage(*fields))


@rpc.functions.async_execution
def _answer_request(*fields: Any) -> torch.futures.Future[_Fields]:
    """Answer a request: the function that ``rpc_async`` calls on the worker."""
    if not _answering:
        raise NotInitializedError("the RPC group of this worker has ended")
    return _answering[0].answer(fields)


def rpc_is_initialized() -> bool:
    """Whether this process takes part in torch's RPC."""
    try:
        rpc.get_worker_info()
    except RuntimeError:
        return False
    return True


def default_options(local_world_size: int) -> rpc.TensorPipeRpcBackendOptions:
    """TensorPipe's options for so many workers on this machine."""
    if 1 < local_world_size <= min(MAX_SHARED_MEMORY_WORKERS, usable_cores() // 2):
        return rpc.TensorPipeRpcBackendOptions()
    return tensorpipe_options_with_sockets()
