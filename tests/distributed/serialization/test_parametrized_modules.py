"""Modules with parametrizations travel, and get the gradients that they get in one process."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import torchopt_dist as todist
from tests.distributed.programs import gradients
from tests.rows import each_row
from torchopt_dist.distributed.serialization.pickling import pack, unpack


class Symmetric(nn.Module):
    def forward(self, x):
        return x + x.T


class Scaled(nn.Linear):
    """Has an attribute of its own, and a parameter without a parametrization."""

    def __init__(self):
        super().__init__(3, 3)
        self.scale = 2.0

    def forward(self, x):
        return self.scale * super().forward(x)


def symmetric():
    module = Scaled()
    parametrize.register_parametrization(module, "weight", Symmetric())
    parametrize.register_parametrization(module, "weight", nn.Tanh())
    return module


MODULES = {
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(3, 3)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(3, 3)).eval(),
    "orthogonal": lambda: nn.Sequential(parametrizations.orthogonal(Scaled()), nn.Tanh()),
    "two in a row": symmetric,
}


@each_row("name", MODULES)
def test_a_parametrized_module_is_rebuilt(name):
    module, x = MODULES[name]().double(), torch.arange(6.0, dtype=torch.float64).reshape(2, 3)
    got = unpack(pack(module, main_by_name=True))
    assert [name for name, _ in got.named_parameters()] == [name for name, _ in module.named_parameters()]
    torch.testing.assert_close(got(x), module(x))
    for part, original in zip(got.modules(), module.modules(), strict=True):
        assert type(part).__name__ == type(original).__name__
        assert type(part).__mro__[1] is type(original).__mro__[1]
        assert parametrize.is_parametrized(part) == parametrize.is_parametrized(original)
    with torch.device("xpu"):  # a default device that is not to be had; nothing is made there
        again = unpack(pack(got, main_by_name=True))
    torch.testing.assert_close(again(x), module(x))
    expected = module(x)
    for part in list(got.modules()):
        if parametrize.is_parametrized(part):
            parametrize.remove_parametrizations(part, "weight")
    torch.testing.assert_close(got(x), expected)


def loss(module, x):
    return (module(x) ** 2).sum()


def test_parametrized_modules_get_gradients(world):
    def body():
        x = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)
        for make in MODULES.values():
            module = make().double()
            spread = todist.parallelize(reducer=todist.sum_reducer)(loss)
            torch.testing.assert_close(
                gradients(spread(module, x), module), gradients(loss(module, x), module)
            )

    world(2).on_zero(body)
