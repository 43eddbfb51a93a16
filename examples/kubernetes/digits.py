"""MAML on handwritten digits, small: a curve of 20 losses, which goes on from the last checkpoint in a folder.

    python digits.py [FOLDER]

Each launcher that starts this program gets the same curve, up to rounding.
"""

import sys
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import torchopt_dist as todist

STEPS, TASKS, WAYS, SHOTS = 20, 4, 3, 5


@todist.parallelize(todist.tasks, todist.mean_reducer)
def adapted_loss(net: nn.Module, images: Tensor) -> Tensor:
    """On a worker: the loss of one task after two steps; ``images`` is of shape (2, WAYS * SHOTS, 64)."""
    net = todist.module_clone(net, by="reference")
    optimizer = todist.MetaSGD(net, lr=0.5)
    labels = torch.arange(WAYS).repeat_interleave(SHOTS)
    for _ in range(2):
        optimizer.step(F.cross_entropy(net(images[0]), labels))
    return F.cross_entropy(net(images[1]), labels)


def sample_tasks(digits: list[Tensor], generator: torch.Generator) -> Tensor:
    """A batch of tasks; of shape (TASKS, 2, WAYS * SHOTS, 64), for adaptation and for the loss."""
    tasks = []
    for _ in range(TASKS):
        chosen = [digits[index] for index in torch.randperm(10, generator=generator)[:WAYS]]
        images = [images[torch.randperm(len(images), generator=generator)[: 2 * SHOTS]] for images in chosen]
        tasks.append(torch.stack(images).unflatten(1, (2, SHOTS)).transpose(0, 1).flatten(1, 2))
    return torch.stack(tasks)


@todist.auto_init_rpc()
@todist.rank_zero_only
def main(folder: str | None = None) -> list[float]:
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    digits = [torch.tensor(pixels[labels == digit] / 16) for digit in range(10)]
    net = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, WAYS)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    generator, curve = torch.Generator().manual_seed(0), list[float]()
    state: dict[str, Any] = {"net": net, "optimizer": optimizer, "generator": generator, "curve": curve}
    done, checkpointer = 0, None
    if folder is not None:
        checkpointer = todist.Checkpointer(folder)
        done, state = checkpointer.restore(state)
        curve = state["curve"]
    for step in range(done + 1, STEPS + 1):
        loss = adapted_loss(net, sample_tasks(digits, generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
        print(f"step {step} on {todist.get_world_size()} workers: {loss:.12f}", flush=True)
        if checkpointer is not None:
            checkpointer.save(step, state)
    return curve


if __name__ == "__main__":
    main(*sys.argv[1:])
