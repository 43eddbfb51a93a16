"""A build of torch without RPC: all goes over ZeroMQ, and what needs RPC says so.

``torch_without_rpc/sitecustomize.py`` makes torch such a one in new Pythons, the launcher's workers included.
"""

from __future__ import annotations

import os

import pytest
from torch.distributed import rpc

from tests import without_rpc
from tests.processes import ROOT, python
from torchopt_dist.distributed.group.group import current_group

BEGIN = """
import pytest
import torch
from torch.distributed import autograd, rpc
assert not rpc.is_available() and not autograd.is_available()
import torchopt_dist as todist
from torchopt_dist.distributed.group.group import current_group

def transport():
    return type(current_group().transport).__name__

"""


def on_such_a_torch(program, before="", **env):
    path = os.pathsep.join((str(without_rpc.FOLDER), str(ROOT)))
    environ = {name: value for name, value in os.environ.items() if name != "TODIST_TRANSPORT"}
    done = python(
        *("-W", "error", "-c", before + BEGIN + program),
        warm=False,
        env={**environ, "PYTHONPATH": path, **env},
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.torch_rpc
def test_workers_of_a_quarter_of_the_tests_are_on_such_a_torch(world, monkeypatch):
    def found():
        return rpc.is_available(), type(current_group().transport).__name__

    assert world(2).on_zero(found) == (True, "RPCTransport")
    monkeypatch.setenv(without_rpc.VARIABLE, "1")
    assert world(2).on_zero(found) == (False, "ZMQTransport")


def test_workers_speak_over_zeromq_unless_they_are_told_otherwise():
    program = """
def main():
    w = torch.ones(3, requires_grad=True)
    loss = todist.remote_sync_call(lambda w: (w * w * w).sum(), args=(w,), partitioner=1)
    (g,) = torch.autograd.grad(loss, w, create_graph=True)
    g.sum().backward()
    return transport(), tuple(w.grad.tolist())

assert set(todist.launch(main, nproc_per_host=2, rpc=True, handlers=[]).results["localhost"]) == {
    ("ZMQTransport", (6.0, 6.0, 6.0))
}
"""
    on_such_a_torch(program)


def test_what_needs_rpc_says_so():
    program = """
@todist.auto_init_rpc()
def main():
    for ask in (
        lambda: todist.autograd.context().__enter__(),
        lambda: todist.autograd.get_gradients(1),
        lambda: todist.autograd.backward(1, torch.ones(1)),
        lambda: todist.autograd.grad(1, torch.ones(1), torch.ones(1, requires_grad=True)),
        lambda: todist.pytree.tree_as_rref([1]),
    ):
        with pytest.raises(todist.errors.NotInitializedError, match="which this build of torch does not have"):
            ask()
    return transport()

assert main() == "ZMQTransport"
assert not todist.autograd.is_available()
"""
    on_such_a_torch(program)


def test_auto_is_zeromq_whatever_the_environment_says():
    program = """
@todist.auto_init_rpc(transport="auto")
def main():
    return transport()

assert main() == "ZMQTransport"
"""
    on_such_a_torch(program, TODIST_TRANSPORT="rpc")


@pytest.mark.parametrize("env", [{}, {"TODIST_TRANSPORT": "rpc"}])
def test_the_transport_rpc_is_refused(env):
    program = f"""
with pytest.raises(todist.errors.InitializationError, match="transport='rpc' needs torch's RPC, which this build"):
    todist.auto_init_rpc(transport={None if env else "rpc"!r})(print)()
"""
    on_such_a_torch(program, **env)


def test_every_module_is_there():
    program = """
import pkgutil
import importlib
for module in pkgutil.walk_packages(todist.__path__, "torchopt_dist."):
    if module.name.removeprefix("torchopt_dist.") not in ("_C", "__main__", "distributed.transport.rpc"):
        importlib.import_module(module.name)
assert todist.typing.RRef.__module__ == "torchopt_dist.core.types"
assert todist.autograd.DistAutogradContext.__module__ == "torchopt_dist.distributed.autograd"
from torchopt_dist import bench
assert [row.peer for row in bench.collect(rounds=1)] == ["torch.optim's foreach", "the formula by hand"]
"""
    on_such_a_torch(program)


MACOS = """
import os, select, selectors, signal, socket
for module, names in (
    (signal, ("SIGRTMIN", "SIGRTMAX", "sigtimedwait")),
    (os, ("memfd_create", "pidfd_open", "pipe2", "sched_getaffinity", "sched_setaffinity")),
    (select, ("epoll",)),
    (selectors, ("EpollSelector",)),
    (socket, ("SO_PEERCRED",)),
):
    for name in names:
        delattr(module, name)
selectors.DefaultSelector = selectors.PollSelector
"""
WINDOWS = f"""
import psutil, subprocess, tempfile, torch, zmq  # which have a Windows of their own
{MACOS}
import sys
for module, names in (
    (os, ("O_DIRECTORY", "fork", "forkpty", "getpgid", "getuid", "killpg", "register_at_fork", "setsid", "waitid")),
    (signal, ("SIGCHLD", "SIGCONT", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGSTOP", "pthread_sigmask", "set_wakeup_fd")),
):
    for name in names:
        delattr(module, name)
for name in ("fcntl", "grp", "pty", "pwd", "resource", "termios"):
    sys.modules[name] = None
"""


@pytest.mark.parametrize("hidden", [MACOS, WINDOWS], ids=["macOS", "Windows"])
def test_what_only_unix_or_linux_has_is_needed_by_launches_alone(hidden, tmp_path):
    """Python's documentation says what they lack."""
    program = f"""
import pkgutil
import importlib
for module in pkgutil.walk_packages(todist.__path__, "torchopt_dist."):
    if module.name.removeprefix("torchopt_dist.") not in ("_C", "__main__", "distributed.transport.rpc"):
        importlib.import_module(module.name)

@todist.auto_init_rpc()
def main():
    w = torch.ones(3, requires_grad=True)
    (loss,) = todist.remote_sync_call(lambda: (4 * w).sum(), partitioner=0)
    loss.backward()
    return transport(), w.grad.tolist()

assert main() == ("ZMQTransport", [4.0, 4.0, 4.0])
with pytest.raises(OSError, match="launching workers needs Linux"):
    todist.launch(main)

from torchopt_dist import bench, report
assert str(report.collect()["processor"]["of them for this process"]) in bench.machine()
net = torch.nn.Linear(1, 1)
for _ in range(2):  # the second one looks for what the first has left
    todist.Checkpointer({str(tmp_path)!r}).save(0, {{"net": net}})
assert todist.Checkpointer({str(tmp_path)!r}).restore({{"net": net}}).step == 0
"""
    on_such_a_torch(program, hidden)
