"""What does one inner loop on two ranks cost, against DDP, a history on each rank, and one process?

Adam through a small transformer and an MLP, float32, one thread a rank, gloo; weights of examples, each rank's own, get
the gradient. The gradient on two ranks is compared with that of one process first. Bytes are what the loopback
interface has counted, so nothing else should use it; seconds need a core for each rank.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from page import ratio, table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import torchopt_dist as todist

EXAMPLES, TOKENS, LENGTH, WIDTH, HEADS = 1024, 64, 32, 128, 4


class Block(nn.Module):
    """Attention and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.heads, self.out = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH, bias=False),
            nn.Linear(WIDTH, WIDTH),
        )
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """As ``nn.Module``."""
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.heads(self.norm(x)).chunk(3, -1)
        )
        seen = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        made: Tensor = x + self.mlp(x)
        return made


class Transformer(nn.Module):
    """Classifies sequences of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.blocks = nn.Embedding(TOKENS, WIDTH), nn.Sequential(Block(), Block())
        self.last = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        """As ``nn.Module``."""
        made: Tensor = self.last(self.blocks(self.token(x)).mean(1))
        return made


class Case:
    """A model, and this rank's part of the examples; weights of these are learned."""

    def __init__(self, kind: str, rank: int, size: int) -> None:
        torch.manual_seed(0)
        if kind == "transformer":
            self.model: nn.Module = Transformer()
            x, self.batch = torch.randint(TOKENS, (EXAMPLES, LENGTH)), 32 // size
        else:
            self.model = nn.Sequential(
                nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 10)
            )
            x, self.batch = torch.randn(EXAMPLES, 64), 256 // size
        self.x, self.y = x[rank::size], torch.randint(10, (EXAMPLES,))[rank::size]
        self.weights = torch.ones(len(self.x), requires_grad=True)
        self.bytes = sum(p.numel() * p.element_size() for p in self.model.parameters())

    def chosen(self, number: int) -> Tensor:
        """The batch of a step."""
        return (torch.arange(self.batch) + number * self.batch) % len(self.x)

    def loss(self, model: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
        """Of a batch."""
        return (self.weights[at] * F.cross_entropy(model(self.x[at]), self.y[at], reduction="none")).mean()

    def adapted(self, steps: int, *, sharded: bool) -> todist.typing.InnerLoopResult:
        """The forward pass."""
        parallel = todist.DataParallel(own=self.weights) if dist.is_initialized() else None
        return todist.inner_loop(
            self.loss,
            todist.adam(lr=1e-3, eps=1e-4),
            self.model,
            self.chosen,
            steps=steps,
            meta=self.weights,
            adjoint=todist.Replayed(sharded=sharded),
            parallel=parallel,
        )

    def gradient(self, made: todist.typing.InnerLoopResult) -> Tensor:
        """The backward pass."""
        at = torch.arange(len(self.x) // 8)
        return torch.autograd.grad(F.cross_entropy(made.params(self.x[at]), self.y[at]), self.weights)[0]

    def training(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The model under DDP, and torch's Adam."""
        model = DistributedDataParallel(copy.deepcopy(self.model))
        return model, torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-4)

    def trained(self, steps: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """The same steps, by these."""
        weights = self.weights.detach()
        for number in range(steps):
            at = self.chosen(number)
            optimizer.zero_grad()
            each = F.cross_entropy(model(self.x[at]), self.y[at], reduction="none")
            (weights[at] * each).mean().backward()
            optimizer.step()


def held() -> int:
    """Bytes of all tensors that there are."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if isinstance(one, Tensor)]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return sum(storages.values())


def timed(function: Callable[[], Any]) -> tuple[float, float, Any]:
    """Seconds, seconds of this process's processor time, and what the function returns; all ranks begin together."""
    if dist.is_initialized():
        dist.barrier()
    wall, own = time.perf_counter(), time.process_time()
    made = function()
    return time.perf_counter() - wall, time.process_time() - own, made


def measured(kind: str, steps: int, rounds: int) -> dict[str, Any]:
    """On each rank, or in one process."""
    torch.set_num_threads(1)
    together = dist.is_initialized()
    case = Case(kind, dist.get_rank() if together else 0, dist.get_world_size() if together else 1)
    found: dict[str, list[float]] = {}
    made = case.adapted(steps, sharded=together)
    history = held()
    del made  # the history, and the adapted parameters with both averages
    history -= held() + 3 * case.bytes
    gradient = case.gradient(case.adapted(steps, sharded=together))
    by_ddp = case.training() if together else ()
    if together:
        case.trained(steps, *by_ddp)  # its first steps make buckets
    for _ in range(rounds):
        for name, sharded in (("replicated", False), ("sharded", True)):
            if sharded and not together:
                continue
            wall, own, made = timed(lambda sharded=sharded: case.adapted(steps, sharded=sharded))
            back, own_back, _ = timed(lambda made=made: case.gradient(made))
            sums = {"forward": wall, "forward cpu": own, "backward": back, "backward cpu": own_back}
            for key, value in sums.items():
                found.setdefault(f"{name} {key}", []).append(value)
        if together:
            wall, own, _ = timed(lambda: case.trained(steps, *by_ddp))
            found.setdefault("ddp", []).append(wall)
            found.setdefault("ddp cpu", []).append(own)
    sent: dict[str, float] = {}
    if together:
        for name, function in {
            "forward": lambda: case.adapted(steps, sharded=True),
            "backward": None,
        }.items():
            dist.barrier()
            count = psutil.net_io_counters(pernic=True)["lo"].bytes_sent
            if function is not None:
                made = function()
            else:
                case.gradient(made)
            dist.barrier()
            count = psutil.net_io_counters(pernic=True)["lo"].bytes_sent - count
            sent[name] = count / dist.get_world_size() / steps / case.bytes
    return {
        "seconds": {name: statistics.median(values) for name, values in found.items()},
        "gradient": gradient,
        "history": history,
        "sent": sent,
        "parameters": case.bytes // 4,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=25, help="of the inner loop (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=3, help="of which medians are taken (default: %(default)s)"
    )
    parser.add_argument("--models", nargs="+", default=["transformer", "mlp"], help="of transformer, mlp")
    args = parser.parse_args()
    rows: dict[str, list[str]] = {}
    for kind in args.models:
        asked = (kind, args.steps, args.rounds)
        # A process of its own, which has the process group of none.
        alone = todist.launch(measured, asked, nproc_per_host=1).rank(0)
        of_ranks = todist.launch(measured, asked, nproc_per_host=2, backend="gloo")
        one, other = of_ranks.rank(0), of_ranks.rank(1)
        joined = torch.stack([one["gradient"], other["gradient"]], 1).flatten()
        error = ((joined - alone["gradient"]).norm() / alone["gradient"].norm()).item()
        assert error < 1e-2, f"{kind}: gradients differ by {error:.1e} of their norm"
        own, two = alone["seconds"], one["seconds"]
        whole = (two["sharded forward"] + two["sharded backward"]) / (
            own["replicated forward"] + own["replicated backward"]
        )
        forward = two["sharded forward"] / two["ddp"]
        backward = two["sharded backward cpu"] / two["replicated backward cpu"]
        closed = 1.0 + 0.5 * (1 + 3 / args.steps**0.5)
        kept = one["history"] / alone["history"]
        more = {
            f"{kind}, {alone['parameters']:,} parameters": "",
            "a step forward, of DDP's": f"{forward:.2f} (CPU {two['sharded forward cpu'] / two['ddp cpu']:.2f})",
            "backward with a sharded history, CPU, of a replicated one's": f"{backward:.2f}",
            "sent a rank and step forward, in parameters (closed form 1)": f"{one['sent']['forward']:.3f}",
            f"backward, sharded (closed form {closed:.3f})": f"{one['sent']['backward']:.3f}",
            "history a rank, of one process's": f"{kept:.3f}",
            "two ranks' time, of one process's": f"{whole:.2f}",
            "a meta-gradient in one process": f"{own['replicated forward'] + own['replicated backward']:.2f} s",
        }
        for name, value in more.items():
            rows.setdefault("" if not value else name, []).append(value or name)
        ratio(f"a step forward on two ranks, {kind}", "DDP", f"{forward:.2f}")
        ratio(
            f"a gradient through {args.steps} steps on two ranks, {kind}",
            "one process",
            f"{whole:.2f}",
        )
    header = rows.pop("")
    table(["", *header], [[name, *values] for name, values in rows.items()])


if __name__ == "__main__":
    main()
