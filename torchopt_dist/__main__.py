"""``torchopt-dist [COMMAND] [ARGUMENT…]``, or ``python -m torchopt_dist`` → the command's work → an exit code."""

from __future__ import annotations

import argparse
import importlib.util
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import torchopt_dist
from torchopt_dist import bench, check, compat
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


def demo(argv: list[str], prog: str) -> int:
    """Run the few-shot example on two workers of this machine.

    Args:
        argv: the command's arguments.
        prog: the command as the user typed it, for its usage and errors.

    Returns:
        As ``launch``; 2 if what the example needs is not installed.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Learn to tell letters of scripts never seen apart after one example, by second-order MAML on two "
        "workers: half a minute of training, then tests, then a picture. All other arguments are the program's; "
        "--minutes 30 is the long version.",
    )
    parser.add_argument("--workers", type=int, default=2, help="how many processes (default: 2)")
    parser.add_argument("--show", action="store_true", help="print where the program is, and do not run it")
    options, rest = parser.parse_known_args(argv)
    package = Path(torchopt_dist.__file__).parent
    # In a clone the example is where people look for it; setup.py puts a copy into the package.
    places = (package.parent / "examples/few_shot.py", package / "_few_shot.py")
    program = next((place for place in places if place.is_file()), None)
    if program is None:
        parser.error(f"the example is in none of {', '.join(map(str, places))}: it is in the repository")
    if options.show:
        print(program)
        return 0
    if missing := [name for name in ("matplotlib", "tqdm") if importlib.util.find_spec(name) is None]:
        parser.error(
            f"the letters and the progress bar need {' and '.join(missing)}: pip install {' '.join(missing)}"
        )
    short = ["--minutes", "0.5", "--test-tasks", "200"]
    return launch(["--nproc-per-host", str(options.workers), str(program), *short, *rest], prog)


def estimate(argv: list[str], prog: str) -> int:
    """Print what an inner loop of a program takes with each adjoint.

    Args:
        argv: the command's arguments.
        prog: the command as the user typed it, for its usage and errors.

    Returns:
        0, or 1 if no adjoint fits the memory that was given.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Print how much memory and time an inner loop would take with each adjoint, from runs "
        "of three steps.",
    )
    parser.add_argument(
        "problem",
        metavar="FILE:FUNCTION",
        help="a function without arguments that returns a dictionary of the arguments of todist.estimate",
    )
    parser.add_argument("--fits", metavar="MEMORY", help="only what needs no more, the fastest first: 8GiB")
    options = parser.parse_args(argv)
    file, _, name = options.problem.rpartition(":")
    if not os.path.isfile(file):
        parser.error(f"argument FILE:FUNCTION: must be a file and a function of it, got {options.problem!r}")
    sys.path.insert(0, os.path.dirname(os.path.realpath(file)))
    function = runpy.run_path(file).get(name)
    arguments = function() if callable(function) else None
    if not isinstance(arguments, dict):
        parser.error(
            f"argument FILE:FUNCTION: `{name}` must be a function that returns the arguments of todist.estimate as a "
            f"dictionary, got {type(function if arguments is None else arguments).__name__}"
        )
    found = torchopt_dist.estimate(**arguments)
    if options.fits is not None:
        try:
            found = found.fits(options.fits)
        except ValueError as error:
            parser.error(f"argument --fits: {error}")
    print(found or f"no adjoint fits {options.fits}")
    return 0 if found else 1


COMMANDS: dict[str, tuple[Callable[[list[str], str], int], str]] = {
    "report": (report, "print what a bug report needs (the default)"),
    "check": (check.main, "try kernels, gradients and a call between two workers, and say what to fix"),
    "demo": (demo, "learn to recognize letters of unseen scripts after one example, on two workers"),
    "estimate": (estimate, "say how much memory and time a loop takes with each adjoint"),
    "launch": (launch, "run a script on several workers"),
    "compat": (compat.main, "run a script that was written for torchopt"),
    "bench": (bench.main, "time an optimizer's step, an inner loop and a call, beside what torch has"),
}
"""Name of a command → the function that runs it, and its line in ``--help``."""


if __name__ == "__main__":
    sys.exit(main())
