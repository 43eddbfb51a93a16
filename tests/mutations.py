"""Mistakes made on purpose in a copy of the tree → which suite sees them: ``python -m tests.mutations [name …]``.

The rows of a product that ``make test`` leaves out must not be those that see a mistake. A line for each mistake is
printed; one that the whole suite sees and the short one does not is an error. Each takes some seconds up to a minute.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests import nightly
from tests.packaging.trees import ROOT, copy_repository


class Mutation(NamedTuple):
    """A text in a file of the package, what stands there instead, and the tests that may see it."""

    file: str
    old: str
    new: str
    tests: str


M = Mutation
MUTATIONS = {
    "Nesterov's look-ahead": M(
        "ops/_sgd.py",
        "sums, momentum) if nesterov",
        "sums, 1) if nesterov",
        "ops/test_sgd.py optim/test_sgd.py",
    ),
    "dampening of the first sum": M(
        "ops/_sgd.py",
        "return 1 - dampening if before else 1.0",
        "return 1 - dampening",
        "ops/test_sgd.py optim/test_sgd.py",
    ),
    "dampening of a first sum that is a tensor": M(
        "ops/_sgd.py",
        "torch.where(before > 0,",
        "torch.where(before >= 0,",
        "ops/test_sgd.py optim/test_sgd.py",
    ),
    "vmap of another dimension": M(
        "ops/_node.py", "return x.movedim(dim, 0)", "return x", "ops/test_under_torch_func.py"
    ),
    "vmap of one of several columns": M(
        "ops/_node.py",
        "x.expand(info.batch_size, *x.shape) if batched[place] else x",
        "x",
        "ops/test_under_torch_func.py",
    ),
    "weight decay of Adam's backward kernel": M(
        "ops/_adam.py",
        "None if self.weight_decay == 0 else columns[3]",
        "None",
        "ops/test_adam_options.py ops/test_adam.py",
    ),
    "a centered variance that rounding makes negative": M(
        "ops/_rmsprop.py",
        "at_least_zero=grad_avgs is not None",
        "at_least_zero=False",
        "ops/test_rmsprop_inputs.py",
    ),
    "half precision of RMSprop": M(
        "ops/_rmsprop.py",
        "c if c is None else widened(c) for c in columns",
        "c for c in columns",
        "ops/test_rmsprop_inputs.py",
    ),
    "a fake of SGD's backward": M(
        "ops/_fake_kernels.py",
        "(momentum != 0) + (weight_decay != 0)",
        "(momentum != 0)",
        "ops/test_layouts.py ops/test_kernels.py",
    ),
    "tensors of several dtypes for a kernel": M(
        "ops/library.py",
        "!= dtypes * (len(rest) // max(len(dtypes), 1))",
        "== []",
        "ops/test_refusals.py ops/test_rmsprop_inputs.py ops/test_sgd.py",
    ),
    "RAdam's learned decay": M(
        "transform/radam.py",
        "torch.where(length > TRUSTED, 0.0, 1 / bias_correction1)",
        "torch.where(length > TRUSTED, 0.0, 1.0)",
        "optim/test_derivatives.py optim/test_differentiable_gradients.py",
    ),
    "the norm of complex gradients": M(
        "transform/clip.py",
        "x.real.square() + x.imag.square() if x.is_complex() else x.square()\n        return",
        "x.real.square() if x.is_complex() else x.square()\n        return",
        "transform/test_clip.py",
    ),
    "clipping gradients of zeros": M(
        "transform/clip.py",
        "torch.where(usable, total, 1.0) ** (1 / order)",
        "total ** (1 / order)",
        "transform/test_clip.py",
    ),
    "clipping by a norm of order 4": M(
        "transform/clip.py",
        "square ** (order // 2)).sum()",
        "square ** (order // 3)).sum()",
        "transform/test_clip.py",
    ),
    "decay of masked weights": M("transform/add_decayed_weights.py", "if chosen[place]]", "]", "transform"),
    "an exponential that rises to its end": M(
        "schedule/transitions.py", "over < 0, over > 0", "over < 0, over < 0", "schedule"
    ),
    "a count at a boundary of schedules": M(
        "schedule/joined.py",
        "bisect_right(boundaries, count)",
        "bisect_right(boundaries, count - 1)",
        "schedule",
    ),
    "the last steps of a loop that stops": M(
        "diff/adjoints/truncated.py",
        "start = max(0, count - self.steps)",
        "start = max(1, count - self.steps)",
        "diff/test_adjoints.py diff/test_random_loops.py",
    ),
    "the weight of both differences": M(
        "diff/adjoints/_differences.py",
        "weight = length / (2 * self.radius)",
        "weight = length / self.radius",
        "diff/test_estimators.py diff/test_adjoints.py",
    ),
    "differences along several tensors": M(
        "diff/adjoints/_differences.py",
        "return torch.linalg.vector_norm(torch.stack([_norm_of_one(tensor) for tensor in tensors]))",
        "return _norm_of_one(tensors[0])",
        "diff/test_estimators.py diff/test_adjoints.py",
    ),
    "parts of a parameter that no rank count divides": M(
        "diff/adjoints/_shards.py",
        "rests = [-len(flat) % ranks.size for flat in flats]",
        "rests = [0 for flat in flats]",
        "diff/test_data_parallel.py",
    ),
    "the mean of gradients of ranks": M(
        "diff/adjoints/_ranks.py",
        "                flat /= self.size\n",
        "                pass\n",
        "diff/test_data_parallel.py",
    ),
    "how many steps run again": M(
        "diff/estimate.py",
        "return r * units - math.comb",
        "return r * units + math.comb",
        "diff/test_estimate.py",
    ),
    "a formula at a special point": M(
        "formulas/special_points.py",
        "bar * torch.sigmoid(difference), bar * torch.sigmoid(-difference)",
        "bar * torch.sigmoid(difference), bar * torch.sigmoid(difference)",
        "formulas/test_special_points.py",
    ),
    "an option below one": M(
        "launching/options.py",
        'raise ValueError(f"`{name}` must be at least 1, got {number}")',
        "pass",
        "launch/test_bad_input.py",
    ),
    "a ridge that is learned": M(
        "linear_solve/_operator.py",
        "[a + ridge.to(v) * v for",
        "[a + ridge.detach().to(v) * v for",
        "linear_solve",
    ),
    "a normal operator of complex numbers": M(
        "linear_solve/_operator.py",
        "return self.inner.transposed().apply(params, self.inner.apply(params, vector))",
        "return self.inner.apply(params, self.inner.apply(params, vector))",
        "linear_solve",
    ),
    "a gradient that must not be differentiated": M(
        "core/second_order.py",
        "if (text := refusal(kind))}",
        "if False and (text := refusal(kind))}",
        "core/test_second_order.py",
    ),
    "a mean in half precision": M(
        "distributed/reduce.py",
        "long = stacked.float() if half else stacked",
        "long = stacked",
        "distributed/test_reduce.py",
    ),
    "results of other kinds": M(
        "distributed/reduce.py", "if not _is_number(leaf):", "if leaf is None:", "distributed/test_reduce.py"
    ),
    "a partitioner that keeps the dimension": M(
        "distributed/partition.py",
        "if self.exclusive and not self.keepdim:\n            return tensor.select",
        "if self.exclusive:\n            return tensor.select",
        "distributed/test_dim_partitioner.py distributed/test_parallelize.py",
    ),
    "even shares": M(
        "distributed/balance.py",
        "start = index * share + min(index, rest)",
        "start = index * share",
        "distributed/test_dim_partitioner.py distributed/test_balance.py distributed/test_map.py",
    ),
    "errors of an answer over ZeroMQ": M(
        "distributed/transport/zmq.py",
        "frames = _frames(error_reply(error))",
        "raise",
        "distributed/transport",
    ),
    "a tensor that a worker holds already": M(
        "distributed/serialization/tensors.py",
        "kind = isinstance(x, nn.Parameter), x.requires_grad",
        "kind = False, x.requires_grad",
        "distributed/test_mirror.py distributed/serialization",
    ),
    "learned rates in half precision": M(
        "nn/learned.py", "like.dtype, torch.float32)", "like.dtype, torch.float16)", "nn"
    ),
    "inner products of complex trees": M(
        "pytree/arithmetic.py", "y * x.conjugate()).real", "y * x).real", "test_pytree.py"
    ),
}


def seen_by(copy: Path, tests: str, marker: str) -> str:
    """The first test among some of a suite that fails in a copy of the tree; nothing if none does."""
    paths = [str(copy / "tests" / name) for name in tests.split()]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", marker, *paths]
    env = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True)
    if ended.returncode not in (0, 1, 2):
        raise RuntimeError(
            f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}"
        )
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", ended.stdout, re.MULTILINE)
    return failed[1] if failed else ""


def main(names: list[str]) -> int:
    """Print a row for each mutation, and return how many only the whole suite sees."""
    lost = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        copy_repository(copy)
        for library in (ROOT / "torchopt_dist").glob("_C*.so"):
            shutil.copy(library, copy / "torchopt_dist")
        for name in names or MUTATIONS:
            one = MUTATIONS[name]
            file = copy / "torchopt_dist" / one.file
            text = file.read_text("utf-8")
            if text.count(one.old) != 1:
                raise ValueError(
                    f"{name}: {one.file} must have once, and has {text.count(one.old)} times: {one.old}"
                )
            file.write_text(text.replace(one.old, one.new), "utf-8")
            short = seen_by(copy, one.tests, nightly.SHORT)
            whole = short or seen_by(copy, one.tests, "")
            file.write_text(text, "utf-8")
            lost += bool(whole and not short)
            how = "both" if short else "ONLY THE WHOLE" if whole else "neither"
            print(f"| {name} | {one.file} | {how} | {whole} |", flush=True)
    return lost


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
