"""The arguments of a ``python`` command → its output and exit code, from a fork of a process that has imported torch.

Importing torch takes longer than most programs under test. A server imports it once, and forks itself for each
program, which gets the arguments, environment, working directory, ``sys.path`` and ``__main__`` that ``python`` would
give it, and ends as ``python`` ends, but for the server's modules, which it does not take apart. Only what reads its
environment while it is imported has read the server's.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NoReturn

import psutil

TORCHRUN = (
    "torch.distributed.launcher.api",
    "torch.multiprocessing.spawn",
    "torch.distributed.rpc",
    "torch._dynamo",  # which the first optimizer imports
)
PROGRAMS = (
    "torchopt_dist.launch",
    "sklearn.datasets",
    "matplotlib.pyplot",
    "tqdm",
    "PIL.Image",
    "setproctitle",
)


class WarmPython:
    """A server that has imported some modules and forks itself for each command."""

    def __init__(self, *modules: str, **env: str) -> None:
        """Start the server; ``env`` adds to its environment."""
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), *modules],
                env={**os.environ, "OMP_NUM_THREADS": "1", **env},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a Ctrl-C ends the test, which ends the server
            )

    def close(self) -> None:
        """End the server and all that it has forked."""
        self._requests.close()
        self._server.wait()

    def start(
        self,
        *arguments: object,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        merged: bool = False,
        warm: bool = True,
    ) -> Job:
        """Start ``python`` with these arguments.

        Args:
            arguments: as on the command line, ``-W error`` and one of ``-c code``, ``-m module``, ``script`` first.
            cwd: the working directory, by default this process's.
            env: the environment, by default this process's.
            merged: whether stdout and stderr are one file, which is then found in stdout.
            warm: if False, the fork executes a new Python, which imports torch itself.
        """
        args = [str(argument) for argument in arguments]
        files = [tempfile.TemporaryFile("w+") for _ in range(1 if merged else 2)]  # noqa: SIM115
        environ = dict(os.environ if env is None else env)
        request = {"args": args, "cwd": str(cwd or Path.cwd()), "env": environ, "warm": warm}
        status, theirs = os.pipe()
        fds = [files[0].fileno(), files[-1].fileno(), theirs]
        socket.send_fds(self._requests, [json.dumps(request).encode()], fds)
        os.close(theirs)
        return Job(args, files, os.fdopen(status))

    def run(self, *arguments: object, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run ``python`` with these arguments to its end, or for at most ``timeout`` seconds."""
        with contextlib.closing(self.start(*arguments, **options)) as job:
            return job.finish(timeout)


class Job:
    """A running command."""

    def __init__(self, args: list[str], printed: list[IO[str]], status: IO[str]) -> None:
        """Wait until the server has forked."""
        self.args, self._files, self._status = args, printed, status
        self.pid = int(self._status.readline())
        self.returncode: int | None = None

    def poll(self, timeout: float | None = 0.0) -> int | None:
        """Return the exit code as :class:`subprocess.Popen` gives it; None if there is none in this time."""
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            # Where the server has ended, what it ran has been killed.
            self.returncode = int(self._status.readline() or -signal.SIGKILL)
        return self.returncode

    def finish(self, timeout: float) -> subprocess.CompletedProcess[str]:
        """Wait for the end; raise :class:`subprocess.TimeoutExpired`, with what was printed, if it does not come."""
        if self.poll(timeout) is None:
            raise subprocess.TimeoutExpired(self.args, timeout, *self._printed())
        assert self.returncode is not None
        return subprocess.CompletedProcess(self.args, self.returncode, *self._printed())

    def close(self) -> None:
        """Kill the command, if it is still running, with its descendants, and close its files."""
        if not self._status.closed and self.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                family = psutil.Process(self.pid)
                for process in (*family.children(recursive=True), family):
                    process.kill()
            self.poll(timeout=None)
        for file in (*self._files, self._status):
            file.close()

    def _printed(self) -> tuple[str, str]:
        texts = []
        for file in self._files:
            file.seek(0)
            texts.append(file.read())
        return texts[0], "".join(texts[1:])


@functools.cache
def warm_python() -> WarmPython:
    """The server for programs of torch and this package, torchrun, and the examples."""
    root = str(Path(__file__).resolve().parents[1])
    server = WarmPython(*TORCHRUN, *PROGRAMS, PYTHONPATH=root, MPLBACKEND="Agg")
    atexit.register(server.close)
    return server


def serve(requests: socket.socket) -> dict[str, Any]:
    """Fork a child for each request until the requests end; return in a child, with its request."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    before = signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, IO[str]] = {}
    while True:
        ready, _, _ = select.select([requests, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            while running:
                pid, ending = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                with contextlib.suppress(BrokenPipeError), running.pop(pid) as status:
                    print(os.waitstatus_to_exitcode(ending), file=status)
        if requests not in ready:
            continue
        data, fds, _, _ = socket.recv_fds(requests, 1 << 20, 3)
        if not data:  # the tests have ended
            for pid in running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            sys.exit()
        status = os.fdopen(fds.pop(), "w")
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, before)
            for fd in (woken, wake):
                os.close(fd)
            for each in (requests, status, *running.values()):
                each.close()
            for target, fd in enumerate(fds, 1):
                os.dup2(fd, target)
                os.close(fd)
            return dict(json.loads(data))
        with contextlib.suppress(OSError):  # the child, which does the same, was first
            os.setpgid(pid, pid)
        running[pid] = status
        print(pid, file=status, flush=True)
        for fd in fds:
            os.close(fd)


def become(args: list[str], cwd: str, env: dict[str, str], path: list[str]) -> None:
    """Run a command as ``python`` does, in this process."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    if args[:2] == ["-W", "error"]:
        del args[:2]
    else:
        sys.warnoptions.clear()
        warnings.simplefilter("default")
    kind, *rest = args
    script = Path(kind).resolve()
    first = {"-c": "", "-m": cwd}.get(kind, str(script.parent))
    added = [folder for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.path[:] = [first, *added, *path]
    if kind == "-m":
        sys.argv[:] = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if kind == "-c":
        source, name = rest.pop(0), "<string>"
        sys.argv[:] = ["-c", *rest]
    else:
        source, name = script.read_text("utf-8"), kind
        sys.argv[:] = [kind, *rest]
        main.__file__ = name
    exec(compile(source, name, "exec", dont_inherit=True), vars(main))


def leave(code: int) -> NoReturn:
    """End as Python does, but for the modules that the server has imported: to take them apart, a fork copies them."""
    threading._shutdown()
    atexit._run_exitfuncs()
    if vars(sys.modules["__main__"]) is not globals():
        vars(sys.modules["__main__"]).clear()
    gc.collect()  # tells of files and sockets that the program has not closed
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


def main() -> None:
    """``warm_python.py FD MODULE …``: import the modules, with warnings as errors, and serve requests from a socket."""
    fd, *modules = sys.argv[1:]
    given = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    base = sys.path[1 + len(given) :]
    del sys.path[0]
    sys.warnoptions.append("error")
    warnings.simplefilter("error")
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collector that walked over these modules in a fork would copy them
    with socket.socket(fileno=int(fd)) as requests:
        request = serve(requests)
    if request.pop("warm"):
        code = 0
        try:
            become(**request, path=base)
        except SystemExit as end:
            if not isinstance(end.code, int | None):
                raise
            code = end.code or 0
        leave(code)
    else:
        os.chdir(request["cwd"])
        os.execve(sys.executable, [sys.executable, *request["args"]], request["env"])


if __name__ == "__main__":
    main()
