"""A function → worker processes that run it → the values that they return: launching from plain Python."""

from torchopt_dist.launch.launcher import Launcher, launch
from torchopt_dist.launch.logs import TerminalHandler, on_ranks
from torchopt_dist.launch.options import add_launcher_args
from torchopt_dist.launch.result import LaunchResult

__all__ = ["LaunchResult", "Launcher", "TerminalHandler", "add_launcher_args", "launch", "on_ranks"]
