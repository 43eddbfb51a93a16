"""``failing_program.py WHERE``: a typo in a function that fails on every worker, on one worker, or in ``main``."""

from __future__ import annotations

import sys

import torch

import torchopt_dist as todist


def typo(x):
    return x.no_such_thing


@todist.parallelize(todist.batch_partitioner, todist.mean_reducer)
def loss_fn(x, where):
    return typo(x) if where == "everywhere" or todist.get_rank() == 1 else x.mean()


@todist.auto_init_rpc()
@todist.rank_zero_only
def main(where):
    x = torch.ones(4)
    return typo(x) if where == "in main" else loss_fn(x, where)


if __name__ == "__main__":
    main(sys.argv[1])
