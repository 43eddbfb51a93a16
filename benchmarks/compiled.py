"""How near does ``compile=True`` come to JAX? A MAML gradient of all tasks, and one through an inner loop of Adam.

One process and one thread each; JAX's process has one core, since it takes a second thread whatever its flags say. The
gradients are compared first, then the ways take turns. The time of the first call, which compiles, is of a fresh
process with no cache, and of a second one with the cache of the first. JAX needs a Python of its own, which
``JAX_PYTHON`` names; without one, ours are timed alone. Run by hand, for all cases or those named:

    python -m venv jaxenv && jaxenv/bin/pip install jax
    JAX_PYTHON=jaxenv/bin/python python benchmarks/compiled.py [tiny digits digits-adam w64 w256 w700]
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

# Widths, optimizer, tasks (0: an inner loop), examples to adapt to and to test on, steps, bound of our time by JAX's.
CASES: dict[str, tuple[tuple[int, ...], str, int, int, int, int, float]] = {
    "tiny": ((1, 40, 40, 1), "sgd", 8, 10, 10, 5, 3.0),
    "digits": ((784, 64, 64, 5), "sgd", 32, 25, 75, 5, 2.5),
    "digits-adam": ((784, 64, 64, 5), "adam", 32, 25, 75, 5, 0.8),
    "w64": ((64, 64, 64, 64, 10), "adam", 0, 64, 64, 200, 2.2),
    "w256": ((64, 256, 256, 256, 10), "adam", 0, 64, 64, 200, 1.3),
    "w700": ((64, 700, 700, 700, 10), "adam", 0, 64, 64, 100, 1.4),
}
LR = {"sgd": 0.05, "adam": 1e-3}
EPS, COLD, WARM, ROUNDS, TOLERANCE = 1e-4, 25.0, 7.0, 7, 1e-2
Way = Callable[[], list[Any]]
MODES: dict[str, Any] = {"compiled": True, "plain": False}


def data(case: str) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Weights and biases in turn, inputs and targets; tasks are dimension 0 if there are any."""
    widths, _, tasks, support, query, _, _ = CASES[case]
    rng = np.random.default_rng(0)
    params = []
    for before, after in itertools.pairwise(widths):
        params += [rng.normal(size=(after, before)) / before**0.5, 0.1 * rng.normal(size=after)]
    shape = (*((tasks,) if tasks else ()), support + query)
    x, y = rng.normal(size=(*shape, widths[0])), rng.normal(size=(*shape, widths[-1]))
    return [p.astype(np.float32) for p in params], x.astype(np.float32), y.astype(np.float32)


def ours(case: str, device: str = "cpu", modes: Mapping[str, Any] = MODES) -> dict[str, Way]:
    """Our ways on a device, each of which returns gradients: for each name what ``compile=`` is, or a plain loop."""
    import torch
    from torch import Tensor, nn

    import torchopt_dist as todist

    torch.set_num_threads(1)
    widths, optimizer, tasks, support, _, steps, _ = CASES[case]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.Tanh()]
    model = nn.Sequential(*layers[:-1]).to(device)
    values, *rest = data(case)
    x, y = (torch.from_numpy(value).to(device) for value in rest)
    with torch.no_grad():
        for p, value in zip(model.parameters(), values, strict=True):
            p.copy_(torch.from_numpy(value))  # also to a GPU

    def task(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        model = todist.module_clone(model)
        inner: Any
        if optimizer == "sgd":
            inner = todist.MetaSGD(model, lr=LR["sgd"])
        else:
            inner = todist.MetaAdam(model, lr=LR["adam"], eps=EPS)
        for _ in range(steps):
            inner.step((model(x[:support]) - y[:support]).square().mean())
        return (model(x[support:]) - y[support:]).square().mean()

    def maml(compile: Any) -> Way:
        options = {} if compile is None else {"vectorize": True, "compile": compile}
        loss = todist.parallelize(todist.tasks, todist.mean_reducer, **options)(task)
        return lambda: list(torch.autograd.grad(loss(model, x, y), list(model.parameters())))

    def loop(compile: Any) -> Way:
        def gradient() -> list[Tensor]:
            weights = torch.ones(support, 1, device=device, requires_grad=True)
            made = todist.inner_loop(
                lambda model: (weights * (model(x[:support]) - y[:support]).square()).mean(),
                todist.adam(lr=LR["adam"], eps=EPS),
                model,
                steps,
                meta=weights,
                adjoint=todist.Replayed(),
                compile=bool(compile) and compile,
            )
            return list(
                torch.autograd.grad((made.params(x[support:]) - y[support:]).square().mean(), weights)
            )

        return gradient

    made = maml if tasks else loop
    return {name: made(mode) for name, mode in modes.items()}


def theirs(case: str) -> dict[str, Way]:
    """The same in JAX."""
    import jax
    import jax.numpy as jnp

    _, optimizer, tasks, support, _, steps, _ = CASES[case]
    params, x, y = jax.tree.map(jnp.asarray, data(case))

    def net(params: Any, x: Any) -> Any:
        for i in range(0, len(params), 2):
            x = x @ params[i].T + params[i + 1]
            x = jnp.tanh(x) if i + 2 < len(params) else x
        return x

    def step(carry: Any, number: Any, x: Any, y: Any, weights: Any) -> Any:
        params, m, v = carry
        g = jax.grad(lambda p: (weights * jnp.square(net(p, x) - y)).mean())(params)
        if optimizer == "sgd":
            return [p - LR["sgd"] * a for p, a in zip(params, g, strict=True)], m, v
        m = [0.9 * a + 0.1 * b for a, b in zip(m, g, strict=True)]
        v = [0.999 * a + 0.001 * b * b for a, b in zip(v, g, strict=True)]
        first, second = 1 - 0.9**number, 1 - 0.999**number
        moved = zip(params, m, v, strict=True)
        return [p - LR["adam"] * (a / first) / (jnp.sqrt(b / second) + EPS) for p, a, b in moved], m, v

    def adapted(params: Any, x: Any, y: Any, weights: Any) -> Any:
        zeros = [jnp.zeros_like(p) for p in params]
        carry = (params, zeros, zeros)
        if tasks:
            for number in range(1, steps + 1):
                carry = step(carry, number, x[:support], y[:support], 1.0)
        else:
            body = jax.checkpoint(lambda c, n: (step(c, n, x[:support], y[:support], weights), None))
            carry, _ = jax.lax.scan(body, carry, jnp.arange(1.0, steps + 1))
        return jnp.square(net(carry[0], x[support:]) - y[support:]).mean()

    def loss(params: Any, weights: Any, x: Any, y: Any) -> Any:
        if tasks:
            return jax.vmap(lambda x, y: adapted(params, x, y, weights))(x, y).mean()
        return adapted(params, x, y, weights)

    gradient = jax.jit(jax.grad(loss, argnums=0 if tasks else 1))
    weights = jnp.ones((support, 1))
    return {"jax": lambda: jax.tree.leaves(jax.block_until_ready(gradient(params, weights, x, y)))}


def serve(which: str, case: str, folder: str) -> None:
    """In a process of its own: each line of the input names a way, whose time is answered; gradients go to a file."""
    ways = (theirs if which == "jax" else ours)(case)
    done = set()
    for line in sys.stdin:
        name = line.strip()
        start = time.perf_counter()
        found = ways[name]()
        seconds = time.perf_counter() - start
        if name not in done:
            np.savez(f"{folder}/{name}.npz", *[np.asarray(one) for one in found])
            done.add(name)
        print("seconds", seconds, flush=True)


class Served:
    """A process that serves a case."""

    def __init__(self, python: str, which: str, case: str, folder: str) -> None:
        flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
        env = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/cache", "XLA_FLAGS": flags}
        self.process = subprocess.Popen(
            [python, __file__, "--serve", which, case, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                **env,
                "PYTHONDONTWRITEBYTECODE": "",
            },  # as by default: imports are part of a first call
        )
        if which == "jax":
            os.sched_setaffinity(self.process.pid, [max(os.sched_getaffinity(0))])

    def seconds(self, way: str) -> float:
        """Of one call."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(way, file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith("seconds "):
                return float(line.split()[1])
        raise RuntimeError(f"the process of {way} ended")

    def end(self) -> None:
        """Wait until it has ended."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def difference(folder: str, one: str, other: str) -> float:
    """Of two ways' gradients, the norm of the difference by the norm."""
    flat = []
    for name in (one, other):
        with np.load(Path(folder) / f"{name}.npz") as found:
            flat.append(np.concatenate([found[key].ravel() for key in found.files]).astype(np.float64))
    return float(np.linalg.norm(flat[0] - flat[1]) / np.linalg.norm(flat[1]))


def measured(case: str) -> list[str]:
    """The row of a case."""
    bound, jax_python = CASES[case][-1], os.environ.get("JAX_PYTHON")
    with tempfile.TemporaryDirectory() as folder:
        first = Served(sys.executable, "ours", case, folder)
        cold = first.seconds("compiled")
        first.end()
        own = Served(sys.executable, "ours", case, folder)
        warm = own.seconds("compiled")
        ways = {"compiled": own, "plain": own}
        if jax_python:
            ways["jax"] = Served(jax_python, "jax", case, folder)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for name, served in ways.items():
            served.seconds(name)
        error = max(difference(folder, name, "plain") for name in ways)
        assert error < TOLERANCE, f"{case}: gradients differ by {error:.1e} of their norm"
        for _ in range(ROUNDS):
            for name, served in ways.items():
                times[name].append(served.seconds(name))
        for served in {id(served): served for served in ways.values()}.values():
            served.end()
    median = {name: float(np.median(found)) for name, found in times.items()}
    jax = median.get("jax")

    def cell(name: str, limit: str = "") -> str:
        of = f" ({median[name] / jax:.2f}{limit})" if jax else ""
        return f"{1e3 * median[name]:.1f} ms{of}"

    return [
        case,
        f"{1e3 * jax:.1f} ms" if jax else "",
        cell("plain"),
        cell("compiled", f", bound {bound:g}"),
        f"{cold:.0f} s",
        f"{warm:.1f} s",
        f"{error:.0e}",
    ]


def main() -> None:
    from page import table

    if "JAX_PYTHON" not in os.environ:
        print("JAX is not compared: JAX_PYTHON names no Python that has it", file=sys.stderr)
    rows = []
    for case in sys.argv[1:] or CASES:
        rows.append(measured(case))
        print(rows[-1], file=sys.stderr, flush=True)
    compiling = [f"first call, no cache (bound {COLD:g} s)", f"second process (bound {WARM:g} s)"]
    table(["", "JAX", "ours", "ours, `compile=True`", *compiling, "largest difference"], rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        if sys.argv[2] == "jax":
            serve(*sys.argv[2:])
        else:
            import torchopt_dist as todist

            todist.auto_init_rpc()(serve)(*sys.argv[2:])
    else:
        main()
