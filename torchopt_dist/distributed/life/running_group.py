"""The settings of ``auto_init_rpc`` → the RPC group of this world: rendezvous → membership → transport → shutdown.

When ``main`` fails on one rank, all ranks end soon: the rank that raises sends its traceback to the others, and those
that do not end by themselves are ended with that traceback.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable

import setproctitle
import torch.distributed as dist
from torch.distributed import rpc

from torchopt_dist.distributed.calls.spread import ask
from torchopt_dist.distributed.group.group import Group, set_group
from torchopt_dist.distributed.life.interruption import (
    LAST_SECONDS,
    Interruption,
    Termination,
    end_threads,
    is_in_backward,
)
from torchopt_dist.distributed.life.own_process import (
    ParentWatch,
    check_descriptors,
    named,
    own_incarnation,
    own_member,
    too_many_files,
)
from torchopt_dist.distributed.life.process_group import (
    abort_process_group,
    begin_process_group,
    end_process_group,
)
from torchopt_dist.distributed.life.report import CppWarnings, one_line, report, tell_torchrun, tell_user
from torchopt_dist.distributed.membership.members import Failure, Member, OnLoss
from torchopt_dist.distributed.membership.membership import Membership
from torchopt_dist.distributed.rendezvous import store as store_module
from torchopt_dist.distributed.rendezvous.environment import (
    WorldInfo,
    all_on_one_machine,
    count_machines,
    read_world,
)
from torchopt_dist.distributed.rendezvous.sealed_store import given_secret, open_store
from torchopt_dist.distributed.rendezvous.store import GroupEndedError
from torchopt_dist.distributed.transport import shutdown
from torchopt_dist.distributed.transport.choice import choose
from torchopt_dist.distributed.worker.handler import handle_request
from torchopt_dist.errors import AgentFailedError, InitializationError, PeerFailedError, WorkerLostError
from torchopt_dist.process import network
from torchopt_dist.process.liveness import Liveness
from torchopt_dist.process.resources import keep_for_next_call

__all__ = ["RunningGroup"]

log = logging.getLogger(__name__)


class RunningGroup:
    """Context manager: the RPC group of this world, from before ``worker_init_fn`` until all ranks are done."""

    def __init__(
        self,
        worker_name_format: Callable[..., str],
        transport: str | None,
        backend: rpc.BackendType | None,
        rpc_backend_options: rpc.RpcBackendOptions | None,
        on_loss: OnLoss,
        liveness: Liveness | None,
        process_group: str | None,
    ) -> None:
        self.settings = (
            worker_name_format,
            transport,
            backend,
            rpc_backend_options,
            on_loss,
            liveness,
            process_group,
        )
        self._process_group = process_group
        self.on_loss = on_loss
        self._take_place(read_world())
        self.incarnation = own_incarnation(on_loss, self.world.world_size)
        self._door: dist.Store | None = None
        given_secret()  # to refuse a bad one before the others are met
        self.liveness = liveness or Liveness.from_environment()
        self.parent_watch = ParentWatch(min(self.liveness.interval, 0.5), self._orphaned)
        self.group: Group | None = None
        self.interruption = Interruption()
        self._unwound = threading.Event()
        self.termination = Termination(self.interruption, self._unwound)
        self._warnings = CppWarnings()
        self._code: int | None = None

    def _take_place(self, world: WorldInfo) -> None:
        worker_name_format, transport, backend, options, on_loss, *_ = self.settings
        self.world = named(world, worker_name_format)
        self.chosen = choose(transport, backend, options, world.local_world_size, on_loss)

    def __enter__(self) -> Group:
        world, chosen = self.world, self.chosen
        if world.world_size > 1 and chosen.init_method == "env://":
            for variable in ("MASTER_ADDR", "MASTER_PORT"):
                if variable not in os.environ:
                    raise InitializationError(
                        f"the environment variable {variable} is missing, and WORLD_SIZE is {world.world_size}: set it "
                        "in all tasks, MASTER_ADDR to the machine of rank 0 and MASTER_PORT to a free port there"
                    )
        host = os.environ.get("MASTER_ADDR", "127.0.0.1") if world.world_size > 1 else "127.0.0.1"
        self._variables = {name: os.environ.get(name) for name in network.VARIABLES}
        network.choose_interface(host)
        keep_for_next_call()
        if world.world_size > 1:
            network.check_loopback(host)
            check_descriptors(chosen.files + world.world_size)
        nonce, plain = store_module.rendezvous(
            world.rank, world.world_size, chosen.init_method, self.incarnation
        )
        if self.on_loss == "replace" and world.world_size > 1 and world.rank == 0:
            self._door = plain
            store_module.note_start(plain, nonce)
        me = own_member(world, self.on_loss, self.incarnation)
        self.membership = Membership(
            me, world.world_size, self._peer_failed, self.liveness, self._peer_replaced
        )
        try:
            with open_store(plain, nonce, world.rank, all_on_one_machine()) as store:
                placed = count_machines(store, world)
                if placed is not world:
                    self._take_place(placed)
                    world, chosen = self.world, self.chosen
                    self.membership.me = own_member(world, self.on_loss, self.incarnation)
                here = network.local_address(host) if world.world_size > 1 else ""
                self.membership.join(store, here, store_module.init_timeout())
            self.group = Group(
                self.membership, self.settings, chosen.call_timeout, chosen.make, ask, handle_request
            )
            atexit.register(self._end_threads)  # now, so that functions that `main` registers run before it
            set_group(self.group)  # before the transport has started, after which others may send requests
            self.group.transport.start(store, store_module.init_timeout())
            if self._process_group is not None:
                begin_process_group(
                    self._process_group, plain, world.rank, world.world_size, world.local_rank
                )
            setproctitle.setproctitle(f"{world.worker_name} of {world.world_size}: {' '.join(sys.argv)}")
        except BaseException as error:
            self.termination.waits = False
            told = too_many_files(error)
            self._abandon(told or error)
            if told is not None:
                raise told from error
            raise
        return self.group

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if self.group is not None and self.group.is_forked():
            return  # the group is the worker's, which goes on
        self.termination.waits = False
        if error is None or (isinstance(error, SystemExit) and not error.code):
            try:
                self.termination.waits = True
                self.termination.check()
                self.membership.final_barrier()  # until then this worker answers calls
                self.termination.waits = False
                assert self.group is not None
                silent = self._leave(self.group)
                if (
                    self._process_group is not None
                ):  # now, since until then this worker answers calls that use it
                    end_process_group()
            except BaseException as late:
                self.termination.waits = False
                self._abandon(late)
                raise late.with_traceback(None) from None
            if silent:
                warnings.warn(
                    f"calls to {', '.join(silent)} were not answered within {shutdown.SHUTDOWN_SECONDS:g} s after "
                    "`main` had returned on all ranks, and were given up: let `main` wait for their futures",
                    RuntimeWarning,
                    stacklevel=3,
                )
            return
        root = None if isinstance(error, GroupEndedError) else self._root_cause(error)
        self._abandon(root or error)
        if root is not None:
            raise root from error

    def _root_cause(self, error: BaseException) -> Exception | None:
        """The error of another rank of which ``error``, raised here, is a consequence: what went wrong first."""
        if not isinstance(error, ConnectionError):
            return None
        self._unwound.wait(0.1)  # the report may be on its way behind the broken connection
        for failure in tuple(self.membership.failures.values()):
            if self._ends_all(failure):
                is_this = (
                    isinstance(error, WorkerLostError) and error.rank == failure.rank and not failure.report
                )
                return None if is_this else failure.error()
        return None

    def _ends_all(self, failure: Failure) -> bool:
        return bool(failure.report) or not self.membership.goes_on_without(failure.rank)

    def _leave(self, group: Group) -> list[str]:
        """End in order, since all ranks have come to the end; returns the names of workers that gave no answer."""
        for wait in group.before_leaving:
            wait(shutdown.SHUTDOWN_SECONDS)
        silent = group.transport.wait_for_replies(shutdown.SHUTDOWN_SECONDS)
        all_answered = self.membership.leave_barrier(not silent, 2 * shutdown.SHUTDOWN_SECONDS)
        self._stop_calls()
        group.transport.stop(in_order=all_answered)
        self._close_membership()
        self._forget(shutdown.GRACE_SECONDS)  # replies have arrived whose senders are still in `set_result`
        return [group.names[worker] for worker in sorted(silent)]

    def _abandon(self, error: BaseException) -> None:
        """End this rank, which has failed: report to the others, unless another rank has, and wait for none of them."""
        self._code = _exit_code(error)
        self._stop_calls()
        self._warnings.silence()
        self._unwound.set()
        if not isinstance(error, GroupEndedError):
            tell_user(error)
        try:
            if not self._is_known_to_all(error):
                self.membership.fail(*report(error))
        except Exception:  # the hub is gone: there is nobody to tell
            log.debug("no connection left to report on", exc_info=True)
        if self.group is not None:
            self.group.transport.stop(in_order=False, code=self._code)
        if not isinstance(error, GroupEndedError):
            self._wait_for_rank_zero()
        with contextlib.suppress(Exception):  # the hub is gone
            self._close_membership()
        self._forget()
        self._warnings.restore()

    def _close_membership(self) -> None:
        if self._door is not None:
            store_module.note_end(self._door)
        self.membership.close()

    def _is_known_to_all(self, error: BaseException) -> bool:
        """Whether the other ranks end anyway, for the reason for which this one does."""
        if isinstance(error, WorkerLostError):
            lost = self.membership.failures.get(error.rank)
            return lost is not None and self._ends_all(lost)
        return isinstance(error, (PeerFailedError, GroupEndedError))

    def _wait_for_rank_zero(self) -> None:
        """Let rank 0 run its ``finally`` blocks, since torchrun kills it when another rank has ended."""
        seconds = shutdown.FINALLY_SECONDS + 2 * shutdown.GRACE_SECONDS
        self.membership.wait_for_hub(LAST_SECONDS if self.termination.told else seconds)

    def _stop_calls(self) -> None:
        """Make no more calls from this worker; it answers those of others until RPC is shut down."""
        if self.group is not None:
            self.group.ending = True
        for name, value in self._variables.items():
            if value is None:  # the group has set it, and a child process may route elsewhere
                os.environ.pop(name, None)

    def _forget(self, seconds: float = 0.0) -> None:
        if self.group is not None:
            set_group(None)
            self.group.close(seconds)
            if not self.group.threads.alive():
                atexit.unregister(self._end_threads)

    def _end_threads(self) -> None:
        """At the end of the interpreter: end what still runs for other workers, or for calls that are given up."""
        if self.group is not None and self.group.ending:
            left = end_threads(self.group.threads.alive(), shutdown.GRACE_SECONDS)
            if self._code is not None and any(map(is_in_backward, left)):
                shutdown.exit_now(self._code)

    def _peer_failed(self, failure: Failure) -> None:
        """In the membership's thread: another rank has failed or was lost. This rank ends as well, or goes on."""
        if self._ends_all(failure):
            self._warnings.silence()
            threading.Thread(target=self._end, args=(failure.error(),), daemon=True).start()
        elif self.group is not None:
            self._forget_values(self.group, failure.rank)
            self.group.streams.forget_sender(failure.rank)
            # No transport notices each cut of the network.
            self.group.transport.worker_lost(failure.rank, failure.error())

    def _peer_replaced(self, member: Member) -> None:
        """In the membership's thread: a rank that was lost has a new process."""
        if self.group is not None:  # otherwise this one is new, too, and has yet to look where the others are
            self._forget_values(self.group, member.rank)
            self.group.transport.worker_replaced(member.rank, member.incarnation)

    def _forget_values(self, group: Group, rank: int) -> None:
        """Free what a worker that is lost would have freed."""
        group.kept_graphs.forget_owner(rank)
        group.residents.forget_owner(rank)
        group.mirrors.forget_owner(rank)

    def _orphaned(self) -> None:
        """In a thread: the agent that has started this worker has ended."""
        error = AgentFailedError(
            f"the process that has started {self.world.worker_name} has ended, as by SIGKILL"
        )
        with contextlib.suppress(Exception):  # rank 0 may have ended for the same reason
            self.membership.fail(*report(error))
        self._end(error)

    def _end(self, error: PeerFailedError | WorkerLostError | AgentFailedError) -> None:
        """End this rank, since another one has failed or was lost, or its agent has ended."""
        if self._process_group is not None:
            abort_process_group()
        if self.group is not None:
            for worker in range(len(self.group.names)):  # `main` waits for no answer any more
                self.group.transport.worker_lost(worker, error)
        if not self.interruption.unwind(error, self._unwound):
            if self.termination.told and self.interruption.is_unwinding():
                return  # who has sent SIGTERM says how long it has
            name = f"{self.world.worker_name} (rank {self.world.rank})"
            with contextlib.suppress(OSError, ValueError):  # nobody may read what is printed
                sys.stdout.flush()
                print(f"{name} is ended, since {one_line(error)}", file=sys.stderr, flush=True)
            self._wait_for_rank_zero()
            tell_torchrun(one_line(error))
            os._exit(1)


def _exit_code(error: BaseException) -> int:
    return error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
