"""The arguments of a ``python`` command → its output and exit code, from a fork of a process that has imported torch.

Importing torch takes longer than most programs under test. A server imports it once, and forks itself for each
program, which gets the arguments, environment, working directory, ``sys.path`` and ``__main__`` that ``python`` would
give it, and ends as ``python`` ends, but for the server's modules, which it does not take apart. Only what reads its
environment while it is imported has read the server's.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import importlib.util
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
import time
import types
import warnings
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn, Self

import psutil

TORCHRUN = (
    "torch.distributed.launcher.api",
    "torch.multiprocessing.spawn",
    "torch.distributed.rpc",
    "torch._dynamo",  # which the first optimizer imports
)
WORKERS = ("pytest", "cloudpickle", "tests.processes")
PROGRAMS = (
    "torchopt_dist.launching",
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
        self._folder = tempfile.TemporaryDirectory(prefix="todist-warm-")
        self.address = f"{self._folder.name}/socket"
        ours, theirs = socket.socketpair()
        with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as requests:
            requests.bind(self.address)
            requests.listen(128)
            self._life = ours
            self._server = subprocess.Popen(
                [sys.executable, __file__, str(requests.fileno()), *modules],
                env={**os.environ, "OMP_NUM_THREADS": "1", **env},
                stdin=theirs,
                pass_fds=[requests.fileno()],
                start_new_session=True,  # a Ctrl-C ends the test, which ends the server
            )

    def close(self) -> None:
        """End the server and all that it has forked."""
        self._life.close()
        self._server.wait()
        self._folder.cleanup()

    def fork(
        self, *arguments: object, files: Sequence[int], cwd: Path, env: Mapping[str, str], warm: bool = True
    ) -> Fork:
        """Start ``python`` with these arguments and, as its standard input, output and error, these files."""
        args = [str(argument) for argument in arguments]
        request = {"args": args, "cwd": str(cwd), "env": dict(env), "warm": warm}
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(self.address)
        socket.send_fds(connection, [json.dumps(request).encode()], list(files))
        return Fork(connection)

    def start(
        self,
        *arguments: object,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        read: str = "",
        stdout: int | None = None,
        merged: bool = False,
        warm: bool = True,
    ) -> Job:
        """Start ``python`` with these arguments.

        Args:
            arguments: as on the command line, ``-W error`` and one of ``-c code``, ``-m module``, ``script`` first; or
                none of these, and the program is what it reads.
            cwd: the working directory, by default this process's.
            env: the environment, by default this process's.
            read: what it reads from its standard input.
            stdout: where it writes, if the caller is to read that elsewhere.
            merged: whether stdout and stderr are one file, which is then found in stdout.
            warm: if False, the fork executes a new Python, which imports torch itself.
        """
        files = [tempfile.TemporaryFile("w+") for _ in range(1 if merged else 2)]  # noqa: SIM115
        with tempfile.TemporaryFile("w+") as given:
            given.write(read)
            given.seek(0)
            fork = self.fork(
                *arguments,
                files=[given.fileno(), files[0].fileno() if stdout is None else stdout, files[-1].fileno()],
                cwd=cwd or Path.cwd(),
                env=os.environ if env is None else env,
                warm=warm,
            )
        return Job(list(map(str, arguments)), files, fork)

    def run(self, *arguments: object, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run ``python`` with these arguments to its end, or for at most ``timeout`` seconds."""
        with self.start(*arguments, **options) as job:
            return job.finish(timeout)

    def executable(self, path: Path) -> Path:
        """Make a file there that does what ``python`` does, in a fork of this server on the caller's machine.

        A machine may be one of network namespaces with a host name and files of its own.
        """
        path.write_text(f"#!{sys.executable} -IS\n{EXECUTABLE.format(address=self.address)}")
        path.chmod(0o755)
        return path


EXECUTABLE = """
import contextlib, json, os, signal, socket, sys

def forward(number, _):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)

if sys.argv[1] == "-S":  # for which there is nothing to be imported
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect({address!r})
    request = dict(args=sys.argv[1:], cwd=os.getcwd(), env=dict(os.environ), warm=True, caller=os.getpid())
    machine = [os.open("/proc/self/ns/" + part, os.O_RDONLY) for part in ("net", "uts", "mnt")]
    socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2, *machine])
    pid = int(server.recv(100))
    signal.signal(signal.SIGTERM, forward)
    code = int(server.recv(100) or -9)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


class Fork:
    """A process that the server has forked.

    Attributes:
        pid: its process id.
        returncode: the exit code as :class:`subprocess.Popen` gives it; None as long as nobody has found it.
    """

    def __init__(self, connection: socket.socket) -> None:
        """Wait until the server has forked."""
        self._connection = connection
        self.pid = int(connection.recv(100))
        self.returncode: int | None = None

    def poll(self, timeout: float | None = 0.0) -> int | None:
        """Return the exit code; None if there is none in this time."""
        if self.returncode is None and select.select([self._connection], [], [], timeout)[0]:
            # Where the server has ended, what it ran has been killed.
            self.returncode = int(self._connection.recv(100) or -signal.SIGKILL)
            self._connection.close()
        return self.returncode

    def kill(self) -> None:
        """Kill the process, if it is still running, with its descendants."""
        if self.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                family = psutil.Process(self.pid)
                for process in (*family.children(recursive=True), family):
                    process.kill()
            self.poll(timeout=None)


class Job:
    """A running command, with what it has printed."""

    def __init__(self, args: list[str], printed: list[IO[str]], fork: Fork) -> None:
        self.args, self._files, self._fork = args, printed, fork
        self.pid = fork.pid

    @property
    def returncode(self) -> int | None:
        """The exit code as :class:`subprocess.Popen` gives it, None while the command runs."""
        return self._fork.poll()

    def poll(self, timeout: float | None = 0.0) -> int | None:
        """Return the exit code; None if there is none in this time."""
        return self._fork.poll(timeout)

    def first_line(self, timeout: float = 30.0) -> str:
        """Wait for the first line that the command prints."""
        deadline = time.monotonic() + timeout
        while not (line := self._printed()[0].partition("\n"))[1]:
            assert time.monotonic() < deadline, f"no line within {timeout:g} s"
            time.sleep(0.005)
        return line[0] + line[1]

    def finish(self, timeout: float) -> subprocess.CompletedProcess[str]:
        """Wait for the end; raise :class:`subprocess.TimeoutExpired`, with what was printed, if it does not come."""
        code = self.poll(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout, *self._printed())
        return subprocess.CompletedProcess(self.args, code, *self._printed())

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What the command has printed on stdout and stderr when it has ended, after which its files are closed."""
        done = self.finish(timeout)
        self.close()
        return done.stdout, done.stderr

    def send_signal(self, number: int) -> None:
        """Send a signal to the command's process alone."""
        os.kill(self.pid, number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the command, if it is still running, with its descendants, and close its files."""
        self._fork.kill()
        for file in self._files:
            file.close()

    def _printed(self) -> tuple[str, str]:
        texts = []
        for file in (
            self._files
        ):  # read where the command does not write: the place in the file is also the command's
            size = os.fstat(file.fileno()).st_size
            texts.append(os.pread(file.fileno(), size, 0).decode(errors="replace"))
        return texts[0], "".join(texts[1:])


@functools.cache
def warm_python(first: Path | None = None) -> WarmPython:
    """The server for programs of torch and this package, torchrun, and the examples, if what these need is there.

    ``first`` is a folder that comes first on its ``PYTHONPATH``.
    """
    folders = [first, Path(__file__).resolve().parents[1], os.environ.get("PYTHONPATH")]
    root = os.pathsep.join(str(folder) for folder in folders if folder)
    there = [name for name in PROGRAMS if importlib.util.find_spec(name.partition(".")[0])]
    server = WarmPython(*TORCHRUN, *there, *WORKERS, PYTHONPATH=root, MPLBACKEND="Agg")
    atexit.register(server.close)
    return server


def serve(requests: socket.socket, life: int) -> dict[str, Any]:
    """Fork a child for each request until ``life`` has ended; return in a child, with its request."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    before = signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([requests, life, woken], [], [])
        if life in ready:  # the tests have ended
            for pid in running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            sys.exit()
        if woken in ready:
            os.read(woken, 4096)
            while running:
                pid, ending = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                with contextlib.suppress(OSError), running.pop(pid) as asker:
                    asker.send(str(os.waitstatus_to_exitcode(ending)).encode())
        if requests not in ready:
            continue
        asker, _ = requests.accept()
        data, fds, _, _ = socket.recv_fds(asker, 1 << 20, 6)
        if not data:  # who has connected has ended
            asker.close()
            continue
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, before)
            for fd in (woken, wake):
                os.close(fd)
            for each in (requests, asker, *running.values()):
                each.close()
            for part, namespace in zip(("net", "uts", "mnt"), fds[3:], strict=False):
                enter(part, namespace)
            for target, fd in enumerate(fds[:3]):
                os.dup2(fd, target)  # the first takes the place of `life`
            for fd in fds:
                os.close(fd)
            return dict(json.loads(data))
        with contextlib.suppress(OSError):  # the child, which does the same, was first
            os.setpgid(pid, pid)
        running[pid] = asker
        with contextlib.suppress(OSError):
            asker.send(str(pid).encode())
        for fd in fds:
            os.close(fd)


def enter(part: str, namespace: int) -> None:
    """Move this process, which has one thread, to another machine's namespace, unless that is its own."""
    if os.fstat(namespace).st_ino != os.stat(f"/proc/self/ns/{part}").st_ino:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace, 0):
            raise OSError(ctypes.get_errno(), "setns")


def become(args: list[str], cwd: str, env: dict[str, str], path: list[str], caller: int = 0) -> None:
    """Run a command as ``python`` does, in this process, which stands for the process ``caller``."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    if env.get("SLURM_TASK_PID") == str(caller):
        os.environ["SLURM_TASK_PID"] = str(os.getpid())
    if args[:1] == [
        "-u"
    ]:  # which matters to nobody: what programs print is read when they have ended, or as they flush
        del args[0]
    if args[:2] == ["-W", "error"]:
        del args[:2]
    else:
        sys.warnoptions.clear()
        warnings.simplefilter("default")
    kind, *rest = args or ["-"]
    script = Path(kind).resolve()
    first = {"-c": "", "-": "", "-m": cwd}.get(kind, str(script.parent))
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
    elif kind == "-":
        source, name = sys.stdin.read(), "<stdin>"
        sys.argv[:] = ["", *rest]
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
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # as where the program has none
            stream.flush()
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
    for finalizer in list(vars(weakref.finalize)["_registry"]):
        finalizer.atexit = (
            False  # torch has one for each of its libraries, and a fork that called them would copy them
        )
    gc.collect()
    gc.freeze()  # a collector that walked over these modules in a fork would copy them
    with socket.socket(fileno=int(fd)) as requests:
        request = serve(requests, life=0)
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
