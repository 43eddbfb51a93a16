"""Loops of models split over ranks, by hand and by DTensors; plans whose second derivative torch drops are refused."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torchopt_dist as todist

ADJOINTS: dict[str, Callable[[], Any]] = {
    "recorded": todist.Recorded,
    "replayed": todist.Replayed,
    "reverse": lambda: todist.Replayed(snapshots=1),
    "forward": lambda: todist.Replayed(),
}


class Layers(nn.Module):
    """Perhaps a layer before, one that can be split by columns, and one by rows."""

    def __init__(self, *, before: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(4, 4, bias=False) if before else nn.Identity()
        self.up, self.down = nn.Linear(4, 6, bias=False), nn.Linear(6, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Two numbers an example."""
        made: Tensor = self.down(torch.tanh(self.up(torch.tanh(self.before(x)))))
        return made


class ByHand(nn.Module):
    """The same, with the columns and rows of this rank."""

    def __init__(self, whole: Layers, group: Any, rank: int, size: int) -> None:
        super().__init__()
        self.before, self.group = copy.deepcopy(whole.before), group
        self.up = nn.Parameter(whole.up.weight.detach().chunk(size, 0)[rank].clone())
        self.down = nn.Parameter(whole.down.weight.detach().chunk(size, 1)[rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        """Two numbers an example, the same on all ranks."""
        x = todist.vary_over(torch.tanh(self.before(x)), self.group, reduction="sum")
        made: Tensor = todist.sum_over(torch.tanh(x @ self.up.t()) @ self.down.t(), self.group)
        return made


def whole(tensor: Tensor) -> Tensor:
    """All of a DTensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model: nn.Module, adjoint: Any, x: Tensor, **options: Any) -> dict[str, Any]:
    """Of a scale in the loss, of the rate, and of the first parameters."""
    scale, lr = (torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (1.5, 0.05))
    optimizer = todist.adam(lr=lr, eps=1e-3)
    if isinstance(model, ByHand):  # each rank has a part of what the rate does to split parameters
        of_parts = todist.adam(lr=todist.vary_over(lr, model.group, reduction="sum"), eps=1e-3)
        labels = {"before.weight": "whole", "up": "parts", "down": "parts"}
        optimizer = todist.transform.partition({"whole": optimizer, "parts": of_parts}, labels)
    made = todist.inner_loop(
        lambda m: scale * whole(m(x)).square().mean(),
        optimizer,
        model,
        4,
        meta=scale,
        adjoint=adjoint,
        **options,
    )
    outer = whole(made.params(x)).square().mean()
    found = torch.autograd.grad(outer, [scale, lr, *model.parameters()])
    names = ["scale", "lr", *(name.removesuffix(".weight") for name, _ in model.named_parameters())]
    return {name: whole(one).tolist() for name, one in zip(names, found, strict=True)}


def inputs(rows: slice = slice(None)) -> Tensor:
    """Eight examples."""
    return torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))[rows]


def split() -> dict[str, Any]:
    """On each rank: what split models give."""
    warnings.simplefilter("ignore")
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "tensor"))
    rows, tensor = slice(mesh.get_local_rank("data"), None, size // 2), mesh["tensor"]
    found: dict[str, Any] = {}
    for name, make in ADJOINTS.items():
        by_hand = ByHand(Layers().double(), tensor, rank % 2, 2)
        options = {"parallel": todist.DataParallel(mesh["data"])} if size > 2 else {}
        found[f"by hand {name}"] = gradients(by_hand, make(), inputs(rows), **options)
        if size == 2:
            by_plan = parallelize_module(
                Layers(before=False).double(), tensor, {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
            found[f"by plan {name}"] = gradients(by_plan, make(), inputs())
            found[f"of DTensors {name}"] = gradients(
                _of_dtensors(tensor), make(), distribute_tensor(inputs(), tensor)
            )
    if size == 2:
        standard = parallelize_module(
            Layers().double(), tensor, {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
        for name, ask in {
            "loop": lambda: gradients(standard, todist.Recorded(), inputs()),
            "step": lambda: todist.MetaSGD(standard, lr=0.1).step(standard(inputs()).square().mean()),
        }.items():
            try:
                ask()
            except ValueError as error:
                found[f"told {name}"] = str(error)
    return found


def _of_dtensors(mesh: DeviceMesh) -> nn.Module:
    model = Layers().double()
    weight = distribute_tensor(model.before.weight.detach(), mesh, [Replicate()])  # type: ignore[arg-type]
    model.before.weight = nn.Parameter(weight)
    plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel(use_local_output=False)}
    return parallelize_module(model, mesh, plan)


def close(wanted: Any, found: Any) -> None:
    """Numbers are the same up to rounding."""
    torch.testing.assert_close(
        torch.tensor(found, dtype=torch.float64),
        torch.tensor(wanted, dtype=torch.float64),
        rtol=1e-9,
        atol=1e-12,
    )


def check(found: dict[str, Any], wanted: dict[str, Any], rank: int) -> None:
    """Compare with one process, of which a rank may have the columns and rows of its own."""
    for name, value in wanted.items():
        if name in ("up", "down") and len(found[name]) * len(found[name][0]) * 2 == len(value) * len(
            value[0]
        ):
            value = (
                torch.tensor(value, dtype=torch.float64).chunk(2, 0 if name == "up" else 1)[rank % 2].tolist()
            )
        close(value, found[name])


def test_split_models_have_the_gradients_of_whole_ones() -> None:
    made = todist.launch(split, nproc_per_host=2, backend="gloo")
    for name, make in ADJOINTS.items():
        wanted = gradients(Layers().double(), make(), inputs())
        without = gradients(Layers(before=False).double(), make(), inputs())
        for rank in range(2):
            check(made.rank(rank)[f"by hand {name}"], wanted, rank)
            check(made.rank(rank)[f"by plan {name}"], without, rank)
            check(made.rank(rank)[f"of DTensors {name}"], wanted, rank)
    for rank in range(2):
        for told in ("told loop", "told step"):
            assert "torch drops its second derivative" in made.rank(rank)[told]


def test_split_models_on_parts_of_batches() -> None:
    made = todist.launch(split, nproc_per_host=4, backend="gloo")
    for name, make in ADJOINTS.items():
        wanted = gradients(Layers().double(), make(), inputs())
        for rank in range(4):
            check(made.rank(rank)[f"by hand {name}"], wanted, rank)
