"""``torchopt-dist [COMMAND] [ARGUMENT…]``, or ``python -m torchopt_dist`` → the command's work → an exit code."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

from torchopt_dist import bench, compat
from torchopt_dist.launching._command import main as launch
from torchopt_dist.report import collect, to_json, to_text

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Run a command; without one, ``report``.

    Args:
        argv: the command line; ``None`` means that of this process.

    Returns:
        The command's exit code.
    """
    argv = sys.argv[1:] if argv is None else argv
    by_module = os.path.realpath(sys.argv[0]) == os.path.realpath(__file__)
    program = "python -m torchopt_dist" if by_module else "torchopt-dist"
    parser = argparse.ArgumentParser(
        prog=program,
        description="Distributed differentiable optimization.",
        epilog=f"`{program} COMMAND --help` shows a command's arguments.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for name, (_, help_) in COMMANDS.items():
        commands.add_parser(name, help=help_)
    if not argv or (argv[0].startswith("-") and argv[0] not in ("-h", "--help")):
        argv = ["report", *argv]  # as `python -m torchopt_dist --json` has it
    name = parser.parse_args(argv[:1]).command
    command, _ = COMMANDS[name]
    try:
        code = command(argv[1:], f"{program} {name}")
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # or Python's own flush fails at the end
        return 1
    return code


def report(argv: list[str], prog: str) -> int:
    """Print the page to paste into a bug report.

    Args:
        argv: the command's arguments.
        prog: the command as the user typed it, for its usage and errors.

    Returns:
        0, also if a section cannot be collected; the section then holds the error.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Print what a bug report needs: versions, kernels, network, cores, GPUs, environment.",
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON, for machines")
    print((to_json if parser.parse_args(argv).json else to_text)(collect()))
    return 0


COMMANDS: dict[str, tuple[Callable[[list[str], str], int], str]] = {
    "report": (report, "print what a bug report needs (the default)"),
    "launch": (launch, "run a script on several workers"),
    "compat": (compat.main, "run a script that was written for torchopt"),
    "bench": (bench.main, "time an optimizer's step, an inner loop and a call, beside what torch has"),
}
"""Name of a command → the function that runs it, and its line in ``--help``."""


if __name__ == "__main__":
    sys.exit(main())
