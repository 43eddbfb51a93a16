"""``python -m torchopt_dist launch [options] train.py [arguments]`` → the script on every worker → an exit code."""

from __future__ import annotations

import argparse
import os
import runpy
import signal
import sys
from typing import NoReturn

from torchopt_dist.errors import RemoteError, TodistError, WorkerFailedError
from torchopt_dist.launching.launcher import Launcher
from torchopt_dist.launching.options import add_launcher_args

__all__ = ["main", "run_program"]


def main(argv: list[str] | None = None, prog: str = "python -m torchopt_dist launch") -> int:
    """Run a script on workers.

    Args:
        argv: the command line; ``None`` means that of this process.
        prog: the command as the user typed it, for its usage and errors.

    Returns:
        0; if a worker failed, the exit code of the first one that did, 128 plus the signal's number if a signal ended
        it, or 1 if it raised; 2 if the command line is wrong.
    """
    parser = _Parser(
        prog=prog,
        description="Run a script on several workers, each with the environment variables that torchrun sets.",
    )
    add_launcher_args(parser)
    parser.add_argument("-m", dest="module", action="store_true", help="the script is a module's name")
    parser.add_argument("script", help="the script, or with -m the module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    args = parser.parse_args(argv)
    if not args.module and not os.path.isfile(args.script):
        parser.error(f"argument script: must be a file, got {args.script!r}")
    try:
        Launcher.from_args(args).run(run_program, args.script, args.arguments, args.module)
    except RemoteError as error:
        print(f"{error.worker} failed:\n\n{error.remote_traceback.rstrip()}", file=sys.stderr)
        return 1
    except WorkerFailedError as error:
        print(error, file=sys.stderr)
        return error.exit_code or (128 + _number(error.signal) if error.signal else 1)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (TodistError, ValueError, TypeError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0


def run_program(program: str, arguments: list[str], module: bool) -> None:
    """Run a program as ``python program arguments`` does, or ``python -m program arguments``.

    Args:
        program: a path, or a module's name.
        arguments: its arguments.
        module: whether ``program`` is a module's name.

    Raises:
        SystemExit: the program exited with anything but 0.
    """
    sys.argv[:] = [program, *arguments]
    # The launcher's own first entry is the folder that it was started from, as it is for `python -m`.
    sys.path.insert(0, os.getcwd() if module else os.path.dirname(os.path.realpath(program)))
    try:
        if module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program, run_name="__main__")
    except SystemExit as ending:
        if ending.code not in (None, 0):
            raise


def _number(name: str) -> int:
    """The number of a signal, whose name may be ``signal 40`` if it is a real-time signal."""
    return int(signal.Signals[name]) if name in signal.Signals.__members__ else int(name.rpartition(" ")[2])


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print the error, with the reason for which the script may have been taken for something else."""
        if "required: script" in message or "unrecognized" in message:
            message += " (--hosts and --copy-env take all words that follow: write `--` before the script)"
        super().error(message)
