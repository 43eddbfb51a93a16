"""``python -m torchopt_dist [--json]`` → the page to paste into a bug report, on standard output."""

from __future__ import annotations

import argparse
import sys

from torchopt_dist.report import collect, to_json, to_text

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Print the report.

    Args:
        argv: the command line; ``None`` means that of this process.

    Returns:
        0: a section that cannot be made says so.
    """
    parser = argparse.ArgumentParser(
        prog="python -m torchopt_dist",
        description="Print what a bug report needs: versions, kernels, network, cores, GPUs, environment.",
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON, for machines")
    print((to_json if parser.parse_args(argv).json else to_text)(collect()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
