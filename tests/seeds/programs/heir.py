"""An engine of metagradients on TorchOpt's functions: a training with checkpoints, and the way back from them.

It is written from TorchOpt's interface. Each step is recorded alone: the floating-point leaves of the state are
differentiated as the parameters are. Checkpoints are torch's distributed ones; a spawned child reads the pickled state.
"""

import multiprocessing
import pickle
import sys
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor

import torch
import torch.distributed.checkpoint as dcp
import torchopt
from torchopt.alias.utils import _get_use_chain_flat, scale_by_neg_lr
from torchopt.combine import chain
from torchopt.pytree import tree_flatten_with_path, tree_iter, tree_map
from torchopt.typing import GradientTransformation, OptState, Params, Updates

STEPS = 5


def signs(lr: float) -> GradientTransformation:
    """A link of the program's own, which takes flat lists, and TorchOpt's last one."""

    def init(params: Params) -> OptState:
        return [torch.zeros_like(x) for x in params]

    def update(
        updates: Updates, state: OptState, *, params: Params | None = None, inplace: bool = True
    ) -> tuple[Updates, OptState]:
        assert isinstance(updates, (list, tuple))
        assert params is None or isinstance(params, (list, tuple))
        state = [0.5 * s + g for s, g in zip(state, updates, strict=True)]
        return [s.tanh() for s in state], state

    assert _get_use_chain_flat()
    return chain.flat(GradientTransformation(init, update), scale_by_neg_lr.flat(lr))


OPTIMIZERS = {
    "adamw": lambda: torchopt.adamw(0.1, betas=(0.8, 0.9), eps_root=1e-8, weight_decay=0.01),
    "sgd": lambda: torchopt.sgd(0.1, momentum=0.9, weight_decay=0.01),
    "scheduled": lambda: torchopt.adamw(lambda step: 0.1 / (1 + step), eps_root=1e-8),
    "signs": lambda: signs(0.1),
}


def is_differentiable(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def saved(params: dict[str, torch.Tensor], state: OptState) -> dict[str, torch.Tensor]:
    paths, leaves, _ = tree_flatten_with_path(state)
    names = [".".join(map(str, path)) for path in paths]
    return {**params, **{f"state/{name}": leaf for name, leaf in zip(names, leaves, strict=True)}}


def loss_of(params: dict[str, torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
    x = torch.linspace(-1, 1, len(weights), dtype=torch.float64)
    made = torch.tanh(x[:, None] * params["w"]) @ params["a"] + params["b"]
    return (weights * (made - x.sin()) ** 2).mean()


def gradients(params: dict[str, torch.Tensor], weights: torch.Tensor, record: bool) -> dict[str, torch.Tensor]:
    with torch.enable_grad():
        found = torch.autograd.grad(loss_of(params, weights), list(params.values()), create_graph=record)
    return dict(zip(params, found, strict=True))


def own_shapes(path: str) -> list[tuple[int, ...]]:
    """In a spawned child: the shapes of what is in a pickled state."""
    with open(path, "rb") as file:
        return [tuple(x.shape) for x in tree_iter(pickle.load(file)) if is_differentiable(x)]


def metagradient(name: str, weights: torch.Tensor, folder: str) -> tuple[torch.Tensor, str]:
    optimizer = OPTIMIZERS[name]()
    # An order that is not the sorted one.
    start = {"w": torch.tensor([0.3, -0.2]), "b": torch.tensor(0.1), "a": torch.tensor([0.5, -0.4])}
    params = {key: x.double().requires_grad_() for key, x in start.items()}
    state = optimizer.init(params)
    for step in range(STEPS):
        dcp.save(saved(params, state), checkpoint_id=f"{folder}/{step}", no_dist=True)
        grads = gradients(params, weights, record=False)
        with torch.no_grad():
            updates, state = optimizer.update(grads, state, params=params, inplace=True)
            params = torchopt.apply_updates(params, updates, inplace=True)
    with open(f"{folder}/state", "wb") as file:
        pickle.dump(state, file)
    if name == "adamw":
        assert state[0].nu[0].shape == (2,)
        assert [int(count) for count in state[0].count] == [STEPS] * 3
        assert [tuple(x.shape) for x in state[0].mu] == [tuple(params[key].shape) for key in sorted(params)]
    query = loss_of(params, torch.ones_like(weights))
    leaves = [x for x in tree_iter(state) if is_differentiable(x)]
    bars = [*torch.autograd.grad(query, list(params.values())), *map(torch.zeros_like, leaves)]
    total = torch.zeros_like(weights)
    for step in reversed(range(STEPS)):
        params = {key: x.detach() for key, x in params.items()}
        state = tree_map(lambda x: x.detach() if is_differentiable(x) else x, state)
        dcp.load(saved(params, state), checkpoint_id=f"{folder}/{step}", no_dist=True)
        leaves = [x for x in tree_iter(state) if is_differentiable(x)]
        inputs = [*params.values(), *leaves]
        for x in inputs:
            x.requires_grad = True
        given = weights.detach().requires_grad_()
        updates, after = optimizer.update(gradients(params, given, True), state, params=params, inplace=False)
        moved = torchopt.apply_updates(params, updates, inplace=False)
        made = [*moved.values(), *(x for x in tree_iter(after) if is_differentiable(x))]
        assert len(made) == len(bars)
        found = torch.autograd.grad(made, [given, *inputs], bars, allow_unused=True)
        total += found[0]
        bars = [torch.zeros_like(x) if bar is None else bar for bar, x in zip(found[1:], inputs, strict=True)]
    return total, f"{folder}/state"


def main() -> None:
    warnings.simplefilter("ignore")
    weights = torch.linspace(0.5, 1.5, 6, dtype=torch.float64)
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            found, path = metagradient(name, weights, folder)
            # By differences of the whole training, forward alone.
            for place in range(2):
                ends = []
                for sign in (1, -1):
                    moved = weights.clone()
                    moved[place] += sign * 1e-5
                    ends.append(end_loss(name, moved))
                expected = float(ends[0] - ends[1]) / 2e-5
                assert abs(float(found[place]) - expected) < 1e-7 + 1e-5 * abs(expected), (name, place, found, expected)
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                shapes = pool.submit(own_shapes, path).result()
            print(name, len(shapes))


def end_loss(name: str, weights: torch.Tensor) -> torch.Tensor:
    optimizer = OPTIMIZERS[name]()
    start = {"w": torch.tensor([0.3, -0.2]), "b": torch.tensor(0.1), "a": torch.tensor([0.5, -0.4])}
    params = {key: x.double().requires_grad_() for key, x in start.items()}
    state = optimizer.init(params)
    for _ in range(STEPS):
        grads = gradients(params, weights, record=False)
        with torch.no_grad():
            updates, state = optimizer.update(grads, state, params=params)
            params = torchopt.apply_updates(params, updates)
    return loss_of(params, torch.ones_like(weights))


if __name__ == "__main__":
    main()
