"""The faults that are promised to be survived, or to be told: what is done, what follows, and within what time.

``test_faults.py`` runs each row, among ranks as torchrun starts them and in a launch; ``benchmarks/faults.py`` prints
them with the times that it measures.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

import torchopt_dist as todist
from tests.processes import Ending, World
from torchopt_dist.launching import Launcher

SIZE = 3


def happens_now() -> None:
    """Note the time of the fault; the folder is the ranks' own."""
    folder = Path(tempfile.gettempdir())
    (folder / "draft").write_text(str(time.monotonic()))
    (folder / "draft").rename(folder / "fault")


def die(how: str) -> None:
    happens_now()
    if how == "exit":
        os._exit(0)
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])


def die_before_a_child() -> None:
    """Die while a process lives that was forked from this one, and that ends after the other ranks."""
    notes = Path(tempfile.gettempdir()).glob("pid*")
    others = {int(note.name.removeprefix("pid")) for note in notes} - {os.getpid()}
    if os.fork():
        die("kill")
    while any(map(psutil.pid_exists, others)):
        time.sleep(0.01)
    os._exit(0)


def spin(seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pass


def raise_in_a_call() -> None:
    happens_now()
    raise KeyError("lost")


def on_rank_one(fault: Callable[[], Any], others: Callable[[], Any]) -> Callable[[], Any]:
    def main() -> Any:
        todist.barrier()
        return fault() if todist.get_rank() == 1 else others()

    return main


def call_it(function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """Rank 0 calls a function on rank 1; the others serve."""

    def main() -> Any:
        todist.barrier()
        if todist.get_rank() == 0:
            return todist.remote_sync_call(function, args=args, partitioner=1)
        return None

    return main


def share(x: torch.Tensor) -> torch.Tensor:
    """Rank 1 dies, and the caller is in its own share meanwhile."""
    if todist.get_rank() == 1:
        die("kill")
    spin()
    return x


def share_with_all() -> Any:
    todist.barrier()
    if todist.get_rank() == 0:
        return todist.remote_sync_call(share, args=(torch.ones(SIZE),))
    return None


def go_on(function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """Survive the death of a worker in a call of that function, and let the others do its work."""

    def main() -> Any:
        todist.barrier()
        total = None
        if todist.get_rank() == 0:
            x = torch.arange(12.0)
            with contextlib.suppress(todist.WorkerLostError):
                todist.remote_sync_call(function, args=args, partitioner=1)
            survivors = todist.dim_partitioner(0, workers=todist.alive())
            total = todist.remote_sync_call(
                torch.sum, args=(x,), partitioner=survivors, reducer=todist.sum_reducer
            )
        todist.barrier()
        return None if total is None else total.item()

    return main


class _Dying(torch.autograd.Function):
    """The identity, of which a worker dies in forward or in backward; where nobody is to die, the identity."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, moment: str) -> torch.Tensor:
        ctx.moment = moment
        if moment == "forward" and todist.get_rank() == 1:
            die("kill")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.moment == "backward" and todist.get_rank() == 1:
            die("kill")
        return grads[0], None


def dying_share(w: torch.Tensor, x: torch.Tensor, moment: str) -> torch.Tensor:
    dying: Callable[[torch.Tensor, str], torch.Tensor] = _Dying.apply
    return torch.nn.functional.dropout(torch.sin(dying(x @ w, moment))).sum()


def retry(moment: str) -> Callable[[], Any]:
    """Differentiate a call undisturbed, and then while a worker dies in it."""

    def main() -> Any:
        todist.barrier()
        if todist.get_rank() != 0:
            return None
        x = torch.linspace(0, 1, 35).reshape(7, 5)
        w = torch.ones(5, requires_grad=True)
        call = todist.parallelize(todist.batch_partitioner, todist.sum_reducer, retries=2)(dying_share)
        gradients = []
        for each in ("", moment):
            torch.manual_seed(0)
            gradients += torch.autograd.grad(call(todist.replicated(w), x, each), w)
        return torch.equal(*gradients)

    return main


def hold_the_interpreter(seconds: float) -> None:
    happens_now()
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))  # a C call that lets no other Python thread run


def exit_well() -> None:
    happens_now()
    sys.exit(0)


# What must have become of the ranks.


def all_end_well(endings: Sequence[Ending]) -> None:
    for ending in endings:
        asked = isinstance(ending.error, SystemExit) and ending.error.code == 0
        assert asked or ending.exitcode == 0, endings


def lost(cause: str) -> Callable[[Sequence[Ending]], None]:
    def check(endings: Sequence[Ending]) -> None:
        assert endings[1].exitcode in (0, -signal.SIGKILL)
        for rank in (0, 2):
            ending = endings[rank]
            assert ending.exitcode == 1, endings
            if ending.error is not None:  # a rank that is in C code ends without its `finally` blocks
                assert isinstance(ending.error, todist.WorkerLostError), endings
                told = (ending.error.rank, ending.error.worker, ending.error.cause)
                assert told == (1, "worker1", cause)

    return check


def raised(kind: type[Exception], rank: int) -> Callable[[Sequence[Ending]], None]:
    def check(endings: Sequence[Ending]) -> None:
        assert isinstance(endings[rank].error, kind), endings
        for ending in endings:
            assert ending.exitcode == 1, endings
            if ending.rank != rank and ending.error is not None:
                assert isinstance(ending.error, todist.PeerFailedError), endings
                assert ending.error.rank == rank

    return check


def gone_on(endings: Sequence[Ending]) -> None:
    assert endings[0].value == 66.0
    assert [ending.exitcode for ending in endings] == [0, -signal.SIGKILL, 0], endings


def retried(endings: Sequence[Ending]) -> None:
    assert endings[0].value is True, endings
    assert [ending.exitcode for ending in endings] == [0, -signal.SIGKILL, 0], endings


# What must have become of a launch.


def worker_failed(outcome: Any) -> None:
    assert isinstance(outcome, todist.WorkerFailedError), outcome
    assert (outcome.rank, outcome.host) == (1, "localhost")


def raised_itself(outcome: Any) -> None:
    assert isinstance(outcome, KeyError), outcome
    assert isinstance(outcome, todist.RemoteError)


def returned(value: Any, lost: Sequence[int] = ()) -> Callable[[Any], None]:
    def check(outcome: Any) -> None:
        assert isinstance(outcome, todist.typing.LaunchResult), outcome
        assert outcome.rank(0) == value
        assert list(outcome.lost) == list(lost)

    return check


@dataclass(frozen=True)
class Fault:
    """A row.

    Attributes:
        name: what goes wrong.
        follows: what follows.
        main: what each rank does; one of them calls :func:`happens_now`.
        check: raises unless the ranks have ended as they ought to.
        launched: likewise of what a launch has returned or raised.
        within: seconds from the fault to the end of the last rank, beside the patience.
        waits: whether the patience goes by first.
        on_loss: as in ``auto_init_rpc``.
    """

    name: str
    follows: str
    main: Callable[[], Any]
    check: Callable[[Sequence[Ending]], None]
    launched: Callable[[Any], None]
    within: float
    waits: bool = False
    on_loss: str = "end"


ENDS_ALL = "every rank ends with a `WorkerLostError` that names rank 1"
FAULTS = (
    Fault(
        "a function raises in a call",
        "its own exception in the caller; the others end with a `PeerFailedError`",
        call_it(raise_in_a_call),
        raised(KeyError, 0),
        raised_itself,
        1.0,
    ),
    Fault(
        "`main` raises on a rank while the others compute",
        "the others end with a `PeerFailedError` that names it",
        on_rank_one(raise_in_a_call, spin),
        raised(KeyError, 1),
        raised_itself,
        1.0,
    ),
    Fault("a worker is killed in a call", ENDS_ALL, call_it(die, "kill"), lost("died"), worker_failed, 1.0),
    Fault(
        "a worker is killed while the caller runs its own share",
        ENDS_ALL,
        share_with_all,
        lost("died"),
        worker_failed,
        1.0,
    ),
    Fault(
        'a worker is killed in a call, `on_loss="continue"`',
        "`WorkerLostError` in the caller; the others do the work, and end with exit code 0",
        go_on(die, "kill"),
        gone_on,
        returned(66.0, lost=[1]),
        1.0,
        on_loss="continue",
    ),
    Fault(
        "the same while a process lives that the worker has forked",
        "the same",
        go_on(die_before_a_child),
        gone_on,
        returned(66.0, lost=[1]),
        1.0,
        on_loss="continue",
    ),
    *(
        Fault(
            f"a worker is killed in {moment}, `retries=2`",
            "its share runs again elsewhere; the gradient is the same, bit for bit",
            retry(moment),
            retried,
            returned(True, lost=[1]),
            1.0,
            on_loss="continue",
        )
        for moment in ("forward", "backward")
    ),
    Fault("`os._exit(0)` in a call", ENDS_ALL, call_it(die, "exit"), lost("died"), worker_failed, 1.0),
    Fault(
        "`os._exit(0)` in `main` while the others compute",
        ENDS_ALL,
        on_rank_one(lambda: die("exit"), spin),
        lost("died"),
        worker_failed,
        1.0,
    ),
    Fault(
        "the same while the others sleep in C code",
        "every rank ends, without its `finally` blocks",
        on_rank_one(lambda: die("exit"), lambda: time.sleep(60)),
        lost("died"),
        worker_failed,
        1.0,
    ),
    Fault(
        "`sys.exit(0)` in `main` of a rank",
        "a good end; the rank serves until the others have returned",
        on_rank_one(exit_well, lambda: None),
        all_end_well,
        returned(None),
        1.0,
    ),
    Fault(
        "a worker is stopped (SIGSTOP)",
        f"it is killed, and {ENDS_ALL}",
        on_rank_one(lambda: die("stop"), todist.barrier),
        lost("stopped"),
        worker_failed,
        1.0,
        waits=True,
    ),
    Fault(
        "a C call holds Python's interpreter lock for longer than the patience",
        "nothing: it is alive, and a `timeout=` is the caller's",
        on_rank_one(lambda: hold_the_interpreter(1.0), lambda: None),
        all_end_well,
        returned(None),
        2.5,
    ),
)


def run(fault: Fault, folder: Path, patience: float) -> tuple[list[Ending], float]:
    """Let a fault happen among ranks that plain ``python`` runs.

    Returns:
        How the ranks ended, and the seconds from the fault to the end of the last of them.
    """
    env = {"TMPDIR": str(folder), "TODIST_LIVENESS": str(liveness(patience))}
    endings = World(SIZE, env=env).endings(on_each(fault, folder), timeout=60, on_loss=fault.on_loss)
    return endings, seconds_since_the_fault(folder)


def launch(fault: Fault, folder: Path, patience: float) -> tuple[Any, float]:
    """Let a fault happen in a launch.

    Returns:
        What it has returned or raised, and the seconds from the fault until then.
    """
    launcher = Launcher(
        nproc_per_host=SIZE,
        rpc=True,
        handlers=[],
        log_dir=None,
        env={"TMPDIR": str(folder)},
        on_loss=fault.on_loss,
        liveness=liveness(patience),
    )
    outcome: Any
    try:
        outcome = launcher.run(on_each(fault, folder))
    except Exception as error:
        outcome = error
    return outcome, seconds_since_the_fault(folder)


def liveness(patience: float) -> todist.Liveness:
    return todist.Liveness(interval=min(1.0, patience / 5), patience=patience)


def on_each(fault: Fault, folder: Path) -> Callable[[], Any]:
    """What each rank does, with the folder for its temporary files and a note there of who it is."""

    def main() -> Any:
        tempfile.tempdir = None
        (folder / f"pid{os.getpid()}").touch()
        return fault.main()

    return main


def seconds_since_the_fault(folder: Path) -> float:
    return time.monotonic() - float((folder / "fault").read_text())
