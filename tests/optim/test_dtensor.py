"""Parameters that are DTensors move as plain ones do, and have the same gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import torchopt_dist as todist
from tests.optim.table import ROWS
from tests.rows import each_row

SETTINGS = [(name, setting) for name, row in ROWS.items() for setting in row.options]
SHAPES = ((6, 4), (4, 2))


@pytest.fixture(scope="module")
def mesh():
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield init_device_mesh("cpu", (1,))
        dist.destroy_process_group()


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Program:
    """Two layers, on a mesh if one is given."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        torch.manual_seed(0)
        tensors = [torch.randn(shape, dtype=torch.float64) for shape in ((3, 6), *SHAPES)]
        if mesh is not None:
            places = [Replicate(), Shard(0), Shard(0)]
            tensors = [distribute_tensor(x, mesh, [p]) for x, p in zip(tensors, places, strict=True)]
        self.x, *params = tensors
        self.params = {name: tensor.requires_grad_() for name, tensor in zip("ab", params, strict=True)}

    def loss(self, params: dict[str, Tensor]) -> Tensor:
        return ((self.x @ params["a"]).tanh() @ params["b"]).square().mean()

    def adapted(self, optimizer, adjoint) -> list[Tensor]:
        made = todist.inner_loop(self.loss, optimizer, self.params, 2, adjoint=adjoint)
        outer = self.loss(made.params)
        return [*map(whole, (outer, *torch.autograd.grad(outer, list(self.params.values()))))]

    def trained(self, optimizer) -> list[Tensor]:
        for _ in range(2):
            optimizer.zero_grad()
            self.loss(self.params).backward()
            optimizer.step()
        return [whole(tensor).detach() for tensor in self.params.values()]


@each_row(("name", "setting"), SETTINGS)
def test_dtensors_are_moved_as_plain_tensors(mesh, name, setting):
    row = ROWS[name]
    options = row.options[setting]
    is_first = setting == next(iter(row.options))
    others = (todist.Replayed(), todist.FirstOrder()) if is_first else ()
    for adjoint in (todist.Recorded(), *others):
        found, expected = (Program(on).adapted(row.function(**options), adjoint) for on in (mesh, None))
        torch.testing.assert_close(found, expected)
    if not is_first:
        return
    programs = [Program(on) for on in (mesh, None)]
    found, expected = (p.trained(row.plain(list(p.params.values()), **options)) for p in programs)
    torch.testing.assert_close(found, expected)


def test_hyperparameters_of_dtensors_have_gradients(mesh):
    found = []
    for on in (mesh, None):
        program, lr = Program(on), torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
        optimizer = todist.chain(todist.transform.clip_grad_norm(0.5), todist.adam(lr=lr, weight_decay=0.1))
        outer = program.loss(todist.inner_loop(program.loss, optimizer, program.params, 2).params)
        found.append(torch.autograd.grad(whole(outer), lr)[0])
    torch.testing.assert_close(whole(found[0]), found[1])
