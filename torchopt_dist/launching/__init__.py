"""A function → worker processes that run it → the values that they return: launching from plain Python."""

from torchopt_dist.launching.launcher import Launcher, launch
from torchopt_dist.launching.logs import TerminalHandler, on_ranks
from torchopt_dist.launching.options import add_launcher_args
from torchopt_dist.launching.result import LaunchResult
from torchopt_dist.process.launchers import world_variables

__all__ = [
    "LaunchResult",
    "Launcher",
    "TerminalHandler",
    "add_launcher_args",
    "launch",
    "on_ranks",
    "world_variables",
]


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
