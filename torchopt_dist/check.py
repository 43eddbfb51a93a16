"""This installation → whether each part of it works, and what to fix: ``torchopt-dist check``."""

from __future__ import annotations

import argparse
import importlib.util
import platform
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

import torchopt_dist as todist
from torchopt_dist.ops import library
from torchopt_dist.process.resources import usable_cores

__all__ = ["CHECKS", "Finding", "collect", "main", "to_text"]

SECONDS = 120.0
"""After so many a launch of two workers has failed."""


class Finding(NamedTuple):
    """What was found out about one part."""

    works: bool
    said: str
    remedy: str = ""
    """What to do, if anything; where the part works, what it would gain."""


def collect() -> Iterator[tuple[str, Finding]]:
    """Try all parts.

    Yields:
        The name of each part and what was found, as soon as it is known. An error of a part is its finding.
    """
    for name, check in CHECKS.items():
        try:
            yield name, check()
        except Exception as error:
            about = f"`torchopt-dist report` prints what a bug report needs; {name} raised this error"
            yield name, Finding(False, f"{type(error).__name__}: {error}", about)


def to_text(name: str, finding: Finding) -> str:
    """A finding as lines of text."""
    first, *rest = finding.said.splitlines() or [""]
    lines = [f"{'ok' if finding.works else 'FAILED':6}  {name}: {first}", *(" " * 8 + line for line in rest)]
    return "\n".join([*lines, *([f"        -> {finding.remedy}"] if finding.remedy else [])])


def main(argv: list[str] | None = None, prog: str = "torchopt-dist check") -> int:
    """Print what was found.

    Args:
        argv: the command line; ``None`` means that of this process.
        prog: the command as the user typed it, for its usage and errors.

    Returns:
        0 if all parts work, otherwise 1.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Try this installation: the kernels, a gradient through an inner loop against finite differences, "
        "and a call between two workers on this machine. For each part that does not work the command says what to "
        "do, and its exit code is 1.",
    )
    parser.parse_args(argv)
    failed = []
    for name, finding in collect():
        print(to_text(name, finding), flush=True)
        failed += [] if finding.works else [name]
    print(f"to fix: {', '.join(failed)}" if failed else "all parts work")
    return 1 if failed else 0


def _versions() -> Finding:
    cores = usable_cores()
    said = (
        f"torchopt_dist {todist.__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{cores} core{'s' if cores > 1 else ''}"
    )
    return Finding(True, said, "" if cores > 1 else "on one core two workers are no faster than one process")


def _kernels() -> Finding:
    """Kernels that are missing are no failure: formulas in Python stand in their places."""
    devices = ["cpu", *(["cuda"] if torch.cuda.device_count() else [])]
    said, remedy = [], ""
    for device in devices:
        missing = {op: why for op in library.OPS if (why := library.why_not(op, device)) is not None}
        if missing:
            remedy = f"steps take longer without the kernels: {library.remedy(library.PACKAGE)}"
        reasons = "; ".join(dict.fromkeys(missing.values()))
        has = f"{len(library.OPS) - len(missing)} of {len(library.OPS)}"
        said.append(f"{has} for {device.upper()}{f': {reasons}' if reasons else ''}")
    return Finding(True, ", ".join(said), remedy)


def _trained(lr: Tensor, w: Tensor) -> Tensor:
    """A scalar and a vector → a loss after five steps of Adam on another one."""
    x = torch.linspace(-1, 1, 4 * len(w), dtype=w.dtype).view(4, len(w))
    made = todist.inner_loop(lambda w: (x @ w - 1).tanh().square().mean(), todist.adam(lr=lr), w, 5)
    return (x[:2] @ made.params).square().sum()


def _gradient() -> Finding:
    lr = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    w = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    exact = torch.cat([one.reshape(-1) for one in torch.autograd.grad(_trained(lr, w), (lr, w))])
    point, found = torch.cat([lr.detach().view(1), w.detach()]), []
    for shift in 1e-6 * torch.eye(len(point), dtype=torch.float64):
        up, down = (_trained(at[0], at[1:].requires_grad_()).item() for at in (point + shift, point - shift))
        found.append((up - down) / 2e-6)
    error = ((exact - torch.tensor(found)).abs().max() / exact.abs().max()).item()
    said = f"through five steps of Adam, off finite differences by {error:.0e} of it"
    if error < 1e-5:
        return Finding(True, said)
    return Finding(False, said, "the numbers are wrong, so please report this: `torchopt-dist report`")


def _on_two_workers() -> float:
    """On each of two workers: the error of a gradient that has gone through a call from rank 0 to rank 1."""
    if todist.get_rank() != 0:
        return 0.0
    x = torch.tensor([0.5, 2.0], requires_grad=True)
    todist.remote_sync_call(_cubed, args=(x,), reducer=todist.sum_reducer, partitioner=1).backward()
    return float("nan") if x.grad is None else (x.grad - 3 * x.detach() ** 2).abs().max().item()


def _cubed(x: Tensor) -> Tensor:
    return (x**3).sum()


def _call(transport: str) -> Finding:
    launcher = todist.Launcher(
        hosts=["localhost"],
        nproc_per_host=2,
        rpc=True,
        timeout=SECONDS,
        env={"TODIST_TRANSPORT": transport},
    )
    advice = (
        "workers meet on this machine's own interface: `torchopt-dist report` shows the network and the variables "
        "that choose another one, and the page on launching has the time-outs"
    )
    try:
        error = launcher.run(_on_two_workers).rank(0)
    except (todist.TodistError, OSError, ValueError) as broken:
        return Finding(False, f"{type(broken).__name__}: {broken}", advice)
    if error < 1e-5:
        return Finding(True, "a value went to the other worker, and its gradient came back")
    return Finding(
        False, f"the gradient came back wrong by {error}", "please report this: `torchopt-dist report`"
    )


def _by_rpc() -> Finding:
    if not torch.distributed.is_available() or not torch.distributed.rpc.is_available():
        return Finding(True, "this build of torch has no RPC, so calls go over ZeroMQ")
    return _call("rpc")


def _by_zmq() -> Finding:
    if importlib.util.find_spec("zmq") is None:
        needed = not torch.distributed.rpc.is_available()
        wanted = (
            "calls need it here" if needed else "it is for on_loss='replace' and calls without torch's RPC"
        )
        return Finding(not needed, "pyzmq is not installed", f"pip install pyzmq; {wanted}")
    return _call("zmq")


CHECKS: Mapping[str, Callable[[], Finding]] = {
    "versions": _versions,
    "kernels": _kernels,
    "gradient": _gradient,
    "two workers, torch's RPC": _by_rpc,
    "two workers, ZeroMQ": _by_zmq,
}
"""Name of a part → what tries it."""
