"""Loops that run on several ranks, and the same on one: what both give is compared."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import torchopt_dist as todist

EXAMPLES, INPUTS, BATCH, STEPS = 24, 5, 12, 6
Numbers = list[Any]


class Frozen(nn.Module):
    """A network with a tied, a frozen and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(INPUTS, INPUTS), nn.Linear(INPUTS, INPUTS)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(2))
        self.last = nn.Linear(INPUTS, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Three logits."""
        logits: Tensor = self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return logits


class Deep(nn.Module):
    """Blocks, of which one has a frozen and an unused parameter, and layers before and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(INPUTS, 7), nn.Linear(7, 3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 7)) for _ in range(3)
        )
        self.blocks[1][0].bias.requires_grad_(False)
        self.blocks[1].unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        """Three logits."""
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.last(x)
        return logits


def network() -> nn.Module:
    """A small one of blocks."""
    return nn.Sequential(nn.Linear(INPUTS, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3))


class Problem:
    """Weights of examples, a decay and a rate, learned through a training; on a part of each batch."""

    def __init__(self, rank: int, size: int, make: Callable[[], nn.Module] = network) -> None:
        generator = torch.Generator().manual_seed(1)
        torch.manual_seed(2)
        self.rank, self.size, self.model = rank, size, make().double()
        self.x = torch.randn(EXAMPLES, INPUTS, generator=generator, dtype=torch.float64)
        self.y = torch.randint(3, (EXAMPLES,), generator=generator)
        self.weights = (1 + 0.1 * torch.arange(EXAMPLES, dtype=torch.float64).sin()).requires_grad_()
        self.own = self.weights.detach()[rank::size].clone().requires_grad_()
        self.decay = torch.tensor(0.01, dtype=torch.float64, requires_grad=True)
        self.lr = torch.tensor(0.05, dtype=torch.float64, requires_grad=True)

    def batch(self, number: int) -> Tensor:
        """The numbers of this rank's examples."""
        of_all = (torch.arange(BATCH) + 5 * number) % EXAMPLES
        return of_all[of_all % self.size == self.rank]

    def loss(self, model: Any, at: Tensor) -> Tensor:
        """The weighted mean over this rank's examples, and a decay: of what is in no block, if there are blocks."""
        each = F.cross_entropy(model(self.x[at]), self.y[at], reduction="none")
        weights = self.own[(at - self.rank) // self.size]
        decayed = model.last.parameters() if isinstance(model, Deep) else model.parameters()
        return (weights * each).mean() + self.decay * sum((p**2).sum() for p in decayed)

    def outer(self, model: Any) -> Tensor:
        """The mean over this rank's part of all examples."""
        part = slice(self.rank, None, self.size)
        return F.cross_entropy(model(self.x[part]), self.y[part])

    def parallel(self, **parts: Any) -> todist.DataParallel | None:
        """How the ranks run the loop; ``None`` without a process group."""
        if not dist.is_initialized():
            return None
        group = alone_in_group() if self.size == 1 else None
        return todist.DataParallel(group, own=self.own, **parts)

    def gradients(self, adjoint: Any, optimizer: Any, **options: Any) -> Numbers:
        """Of the weights (in a list, one a rank), and of what all ranks have: decay, rate, first parameters."""
        torch.manual_seed(3 + self.rank)
        parts = options.pop("parts", {})
        parallel = self.parallel(**parts)
        steps = options.pop("steps", STEPS)
        made = todist.inner_loop(
            options.pop("loss", self.loss),
            optimizer(self.lr),
            self.model,
            self.batch,
            steps=steps,
            meta=(self.own, self.decay),
            adjoint=adjoint(),
            parallel=parallel,
            **options,
        )
        params = [p for p in self.model.parameters() if p.requires_grad]
        value = self.outer(made.params) + made.losses.sum() * (0.1 if made.losses.requires_grad else 0)
        found = torch.autograd.grad(value, [self.own, self.decay, self.lr, *params], allow_unused=True)
        norms = [made.gradient_norms] if options.get("diagnose") else []
        return [_numbers(one) for one in [*found, made.losses, *norms]]


@cache
def alone_in_group() -> Any:
    """A process group of this rank alone."""
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


def _numbers(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.detach().tolist()


OPTIMIZERS: dict[str, Callable[[Tensor], Any]] = {
    "sgd": lambda lr: todist.sgd(lr=lr),
    "momentum": lambda lr: todist.sgd(lr=lr, momentum=0.9, nesterov=True),
    "adam": lambda lr: todist.adam(lr=lr, eps=1e-3),
    "adamw": lambda lr: todist.adamw(lr=lr, eps=1e-3),
    "rmsprop": lambda lr: todist.rmsprop(lr=lr, eps=1e-3),
    "adan": lambda lr: todist.adan(lr=lr, eps=1e-3),
    "clipped": lambda lr: todist.chain(todist.transform.clip_grad_norm(0.1), todist.adam(lr=lr, eps=1e-3)),
}


def _kinds_of(params: Any) -> Any:
    return todist.pytree.map_tensors(lambda one: "matrix" if one.ndim == 2 else "other", params)


OTHERS: dict[str, Callable[[Tensor], Any]] = {
    "scheduled": lambda lr: todist.adam(lr=lambda step: lr / (1 + step), eps=1e-3),
    "adadelta": lambda lr: todist.adadelta(lr=20 * lr, eps=1e-3),
    "adafactor": lambda lr: todist.adafactor(lr=lr),
    "adagrad": lambda lr: todist.adagrad(lr=lr, eps=1e-3),
    "adamax": lambda lr: todist.adamax(lr=lr, eps=1e-3),
    "lamb": lambda lr: todist.lamb(lr=lr, eps=1e-3),
    "lion": lambda lr: todist.lion(lr=lr),
    "muon": lambda lr: todist.transform.partition(
        {"matrix": todist.muon(lr=lr), "other": todist.adamw(lr=lr, eps=1e-3)}, _kinds_of
    ),
    "radam": lambda lr: todist.radam(lr=lr, eps=1e-3),
}
"""The other optimizers, which run a few steps on each number of ranks."""
ADJOINTS: dict[str, Callable[[], Any]] = {
    "recorded": todist.Recorded,
    "replayed": todist.Replayed,
    "forward": lambda: todist.Replayed(),
    "reverse": lambda: todist.Replayed(),
    "blocks": lambda: todist.Replayed(blocks="auto"),
    "snapshots": lambda: todist.Replayed(snapshots=3),
    "snapshots, reverse": lambda: todist.Replayed(snapshots=3),
    "sharded": lambda: todist.Replayed(sharded=dist.is_initialized()),
    "sharded, snapshots": lambda: todist.Replayed(snapshots=3, sharded=dist.is_initialized()),
    "sharded, memory": lambda: todist.Replayed(memory="20kB", sharded=dist.is_initialized()),
    "sharded, blocks": lambda: todist.Replayed(blocks="auto", store="cpu", sharded=dist.is_initialized()),
    "truncated": lambda: todist.Truncated(3),
    "first order": todist.FirstOrder,
    "reptile": todist.Reptile,
    "finite difference": todist.FiniteDifference,
    "sama": todist.SAMA,
    "implicit": lambda: todist.Implicit(
        todist.linear_solve.solve_cg(maxiter=5, ridge=1.0), not_converged="ignore"
    ),
}
CASES = [("adam", name) for name in ADJOINTS] + [
    (name, adjoint) for name in OPTIMIZERS for adjoint in ("recorded", "sharded") if name != "adam"
]


def _second(problem: Problem, adjoint: Any, third: bool = False, **parts: Any) -> Numbers:
    parallel = problem.parallel(**parts)
    made = todist.inner_loop(
        problem.loss,
        todist.adam(lr=problem.lr, eps=1e-3),
        problem.model,
        problem.batch,
        steps=4,
        meta=(problem.own, problem.decay),
        adjoint=adjoint(),
        parallel=parallel,
    )
    given = [problem.decay, problem.lr]
    found = torch.autograd.grad(problem.outer(made.params), given, create_graph=True)
    again = torch.autograd.grad(found[0] * found[1], [problem.own, *given], create_graph=third)
    if third:
        again = torch.autograd.grad(again[1] * again[2], [problem.own, *given])
    return [_numbers(one) for one in [*again, made.losses]]


def _nested(problem: Problem, adjoint: Any, dependent: bool = False) -> Numbers:
    """A loop around those of the ranks, which is no loop of ranks itself.

    If some of its tensors depend on others, it puts others in their places, also in those of ``vary_over``.
    """
    first = torch.tensor(0.02, dtype=torch.float64, requires_grad=True)
    decay = problem.decay
    if dependent:
        problem.decay = 2 * decay

    def outer(rate: Tensor) -> Tensor:
        made = todist.inner_loop(
            lambda model, at: problem.loss(model, at) * (1 + rate),
            todist.sgd(lr=problem.lr + rate),
            problem.model,
            problem.batch,
            steps=2,
            meta=(problem.own, problem.decay, rate),
            adjoint=todist.Replayed(),
            parallel=problem.parallel(),
        )
        value = problem.outer(made.params)
        if problem.size == 1:
            return value + problem.decay**3
        return todist.mean_over(value + todist.vary_over(problem.decay) ** 3)

    params = tuple(problem.model.parameters())
    meta = (problem.own, decay, problem.lr, *params, *([problem.decay] if dependent else []))
    made = todist.inner_loop(outer, todist.sgd(lr=0.1), first, 2, meta=meta, adjoint=adjoint())
    found = torch.autograd.grad(made.params, [problem.own, decay, problem.lr, first])
    return [_numbers(one) for one in [*found, made.losses]]


def _vmap(problem: Problem, adjoint: Any) -> Numbers:
    parallel = problem.parallel()
    tree = dict(problem.model.named_parameters())

    def task(shift: Tensor) -> Tensor:
        def loss(params: Any, at: Tensor) -> Tensor:
            logits = torch.func.functional_call(problem.model, params, (problem.x[at] + shift,))
            each = F.cross_entropy(logits, problem.y[at], reduction="none")
            weights = problem.own[(at - problem.rank) // problem.size]
            return (weights * each).mean() + problem.decay * sum((p**2).sum() for p in params.values())

        made = todist.inner_loop(
            loss,
            todist.sgd(lr=problem.lr),
            tree,
            problem.batch,
            steps=3,
            meta=(problem.own, problem.decay),
            adjoint=adjoint(),
            parallel=parallel,
        )
        part = slice(problem.rank, None, problem.size)
        logits = torch.func.functional_call(problem.model, made.params, (problem.x[part],))
        return F.cross_entropy(logits, problem.y[part])

    values = torch.vmap(task, randomness="different")(torch.tensor([0.0, 0.1, 0.2], dtype=torch.float64))
    found = torch.autograd.grad(values.sum(), [problem.own, problem.decay, problem.lr])
    return [_numbers(one) for one in [*found, torch.zeros(())]]


def _one_unused(problem: Problem) -> Numbers:
    """A parameter that only rank 0 uses: without `parallel` the mean of all ranks' losses uses it once."""
    extra = nn.Parameter(torch.tensor([0.5, -0.5, 0.25], dtype=torch.float64))
    problem.model.register_parameter("extra", extra)

    def loss(model: Any, at: Tensor) -> Tensor:
        value = problem.loss(model, at) - problem.decay * (model.extra**2).sum()
        if problem.rank == 0:
            value = value + (model.extra**2).sum() * (problem.size / 2 if dist.is_initialized() else 0.5)
        return value

    if problem.rank == 0:
        return problem.gradients(todist.Replayed, OPTIMIZERS["adam"], loss=loss)

    def without(model: Any, at: Tensor) -> Tensor:
        each = F.cross_entropy(model(problem.x[at]), problem.y[at], reduction="none")
        weights = problem.own[(at - problem.rank) // problem.size]
        rest = [p for name, p in model.named_parameters() if name != "extra"]
        return (weights * each).mean() + problem.decay * sum((p**2).sum() for p in rest)

    return problem.gradients(todist.Replayed, OPTIMIZERS["adam"], loss=without)


def _parts(
    rank: int, size: int, adjoint: str, optimizer: str, make: Any = network, **options: Any
) -> Numbers:
    parts = {"shard": "state"} if dist.is_initialized() else {}
    return Problem(rank, size, make).gradients(
        ADJOINTS[adjoint], OPTIMIZERS[optimizer], parts=parts, **options
    )


def _parameters(rank: int, size: int, optimizer: str, **settings: Any) -> Numbers:
    parts = {"shard": "parameters"} if dist.is_initialized() else {}
    adjoint = partial(todist.Replayed, blocks="auto", **settings)
    return Problem(rank, size, Deep).gradients(adjoint, OPTIMIZERS[optimizer], parts=parts)


def _in_parts(rank: int, size: int, adjoint: str) -> Numbers:
    """Micro-batches on ranks, a whole batch on one."""
    problem = Problem(rank, size)
    if not dist.is_initialized():
        return problem.gradients(ADJOINTS[adjoint], OPTIMIZERS["clipped"])
    return problem.gradients(ADJOINTS[adjoint], OPTIMIZERS["clipped"], accumulate=4)


def _in_parts_of_blocks(rank: int, size: int) -> Numbers:
    """Micro-batches for which ranks gather the parameters block by block."""
    problem = Problem(rank, size, Deep)
    options = {"parts": {"shard": "parameters"}, "accumulate": 3} if dist.is_initialized() else {}
    return problem.gradients(ADJOINTS["blocks"], OPTIMIZERS["adam"], **options)


def _counted(rank: int, size: int, adjoint: str) -> Numbers:
    """Examples that do not all count, so that ranks and micro-batches have different numbers of them."""
    problem = Problem(rank, size)

    def loss(model: Any, at: Tensor) -> Any:
        counts = (at % 5 < 2 + at % 2).to(torch.float64)
        each = F.cross_entropy(model(problem.x[at]), problem.y[at], reduction="none")
        total = (problem.own[(at - rank) // size] * each * counts).sum()
        return (total, counts.sum()) if dist.is_initialized() else total / counts.sum()

    options = {"accumulate": 3} if dist.is_initialized() else {}
    return problem.gradients(ADJOINTS[adjoint], OPTIMIZERS["adam"], loss=loss, **options)


def _stop(number: int, loss: Tensor) -> bool:
    return number == 4


def _gradients(
    rank: int,
    size: int,
    adjoint: str,
    optimizer: str = "adam",
    make: Callable[[], nn.Module] = network,
    **options: Any,
) -> Numbers:
    made = {**OPTIMIZERS, **OTHERS}[optimizer]
    return Problem(rank, size, make).gradients(ADJOINTS[adjoint], made, **options)


def _of_problem(
    rank: int, size: int, function: Callable[[Problem, Callable[[], Any]], Numbers], adjoint: str
) -> Numbers:
    return function(Problem(rank, size), ADJOINTS[adjoint])


ASKED: dict[str, Callable[[int, int], Numbers]] = {
    f"{adjoint} {optimizer}": partial(_gradients, adjoint=adjoint, optimizer=optimizer)
    for optimizer, adjoint in CASES
}
for _name in ("recorded", "sharded", "snapshots"):
    ASKED[f"tied {_name}"] = partial(_gradients, adjoint=_name, make=Frozen)
    ASKED[f"stop {_name}"] = partial(_gradients, adjoint=_name, stop=_stop)
    ASKED[f"diagnosed {_name}"] = partial(_gradients, adjoint=_name, steps=4, diagnose=True)
for _name in ("recorded", "replayed"):
    ASKED[f"second {_name}"] = partial(_of_problem, function=_second, adjoint=_name)
    ASKED[f"nested {_name}"] = partial(_of_problem, function=_nested, adjoint=_name)
    ASKED[f"vmap {_name}"] = partial(_of_problem, function=_vmap, adjoint=_name)
for _name in ("recorded", "reverse", "forward", "snapshots", "truncated", "first order", "reptile"):
    ASKED[f"parts {_name} adam"] = partial(_parts, adjoint=_name, optimizer="adam")
for _name in OPTIMIZERS:
    if _name not in ("adam", "clipped"):
        ASKED[f"parts replayed {_name}"] = partial(_parts, adjoint="replayed", optimizer=_name)
for _name in ("recorded", "replayed"):
    ASKED[f"parts tied {_name}"] = partial(_parts, adjoint=_name, optimizer="adamw", make=Frozen)
for _name in OTHERS:
    ASKED[f"few {_name}"] = partial(_gradients, adjoint="replayed", optimizer=_name, steps=3)
for _name in ADJOINTS:
    ASKED[f"micro-batches {_name}"] = partial(_in_parts, adjoint=_name)
for _name in ("recorded", "replayed"):
    ASKED[f"micro-batches, parts {_name}"] = lambda rank, size, name=_name: _parts(
        rank, size, name, "adam", **({"accumulate": 3} if dist.is_initialized() else {})
    )
ASKED["micro-batches, parameters"] = _in_parts_of_blocks
for _name in ("recorded", "replayed", "truncated", "first order", "finite difference"):
    ASKED[f"counted {_name}"] = partial(_counted, adjoint=_name)
ASKED["parameters adamw"] = partial(_parameters, optimizer="adamw")
ASKED["parameters momentum"] = partial(_parameters, optimizer="momentum", store="cpu")
ASKED["parameters adam"] = partial(_parameters, optimizer="adam", snapshots=3)
ASKED["parameters second"] = lambda rank, size: _second(
    Problem(rank, size, Deep),
    ADJOINTS["blocks"],
    **({"shard": "parameters"} if dist.is_initialized() else {}),
)
ASKED["third replayed"] = lambda rank, size: _second(Problem(rank, size), ADJOINTS["replayed"], third=True)
for _name in ("recorded", "replayed"):
    ASKED[f"nested {_name}, dependent"] = partial(
        _of_problem, function=partial(_nested, dependent=True), adjoint=_name
    )
ASKED["parts second"] = lambda rank, size: _second(
    Problem(rank, size), ADJOINTS["replayed"], **({"shard": "state"} if dist.is_initialized() else {})
)
ASKED["long sharded"] = lambda rank, size: Problem(rank, size).gradients(
    ADJOINTS["sharded"], OPTIMIZERS["adam"], steps=60
)
ASKED["unused replayed"] = lambda rank, size: _one_unused(Problem(rank, size))
_EACH = [name for name in ASKED if name.startswith("few") or name == "parameters adamw"]
_REST = [name for name in ASKED if name not in _EACH]
NAMES = {
    1: [*_EACH, "sharded adam", "recorded sgd", "parts replayed adamw", "tied sharded", "second replayed"],
    2: [*ASKED],
    3: [*_EACH, *_REST[::2]],
    4: [*_EACH, *_REST[1::2]],
}
"""By the number of ranks, what is asked."""
BY_DAY = {
    1: [name for name in NAMES[1] if name not in _EACH],
    2: [name for place, name in enumerate(_REST) if place % 4],
    3: [*_EACH, *_REST[::4]],
}
"""Each case on two ranks or on three."""


def answers(rank: int, size: int, asked: Iterable[str] = ASKED) -> dict[str, Numbers]:
    """What cases give on a rank."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    return {name: ASKED[name](rank, size) for name in asked}


def on_rank(names: dict[int, list[str]]) -> dict[int, dict[str, Numbers]]:
    """What a worker of a launch gives, by the number of ranks in its group; one of two also runs loops by itself."""
    size = dist.get_world_size()
    found = {size: answers(dist.get_rank(), size, names[size])}
    if size == 2:
        found[1] = answers(0, 1, names[1])
    return found


def evolution(rank: int, size: int) -> dict[str, Numbers]:
    """Estimates: of what all ranks have, by the same noise; of what each has, by its own."""
    problem = Problem(rank, size)
    adjoints = {
        "same": lambda: todist.EvolutionStrategies(4, 0.01),
        "persistent": lambda: todist.PersistentEvolutionStrategies(4, 0.01, unroll=2),
    }
    found = {name: problem.gradients(make, OPTIMIZERS["adam"]) for name, make in adjoints.items()}
    torch.manual_seed(5)
    own = torch.full((2,), 1.0 + rank, dtype=torch.float64, requires_grad=True)
    parallel = todist.DataParallel(own=own) if dist.is_initialized() else None
    made = todist.inner_loop(
        lambda w: ((w - own) ** 2).sum(),
        todist.sgd(lr=0.25),
        torch.zeros(2, dtype=torch.float64, requires_grad=True),
        2,
        meta=own,
        adjoint=todist.EvolutionStrategies(400, 0.1),
        parallel=parallel,
    )
    # After two steps w is 3/4 of the mean of all ranks' tensors.
    found["own"] = torch.autograd.grad(made.params.sum(), own)[0].tolist()
    return found


def evolution_on_rank() -> dict[str, Numbers]:
    """What a worker of a launch gives."""
    return evolution(dist.get_rank(), dist.get_world_size())


class Noisy(nn.Module):
    """A network with dropout and batch normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 1))

    def forward(self, x: Tensor) -> Tensor:
        """One number an example."""
        made: Tensor = self.layers(x)
        return made


def noisy() -> dict[str, Numbers]:
    """A loop with dropout, twice; ranks have the same data, so that they differ by dropout alone."""
    torch.manual_seed(0)
    model = Noisy().double()
    x = torch.randn(8, 4, dtype=torch.float64)
    scale = torch.ones(4, dtype=torch.float64, requires_grad=True)
    masks = []

    def loss(model: Any) -> Tensor:
        masks.append(torch.rand(3).tolist())
        value: Tensor = (model(x * scale + dist.get_rank()) ** 2).mean()
        return value

    found: dict[str, Numbers] = {}
    for name, adjoint in (("recorded", todist.Recorded()), ("replayed", todist.Replayed(sharded=True))):
        made = todist.inner_loop(
            loss,
            todist.sgd(lr=0.1),
            model,
            3,
            meta=scale,
            adjoint=adjoint,
            seed=7,
            parallel=todist.DataParallel(),
        )
        value = (made.params.eval()(x) ** 2).mean()
        found[name] = torch.autograd.grad(value, scale)[0].tolist()
        found[f"{name} mean"] = made.params.layers[1].running_mean.tolist()
        found[f"{name} weight"] = made.params.layers[0].weight.tolist()
    found["masks"] = masks[:3]
    return found


def transposes() -> dict[str, Any]:
    """Derivatives of ``mean_over`` and ``vary_over`` of first and second order, in both modes."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def function(x: Tensor) -> Tensor:
        one: Tensor = todist.mean_over({"a": ((rank + 1) * todist.vary_over(x) ** 3).sum()})["a"]
        return one**2

    x = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(function(x), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    value, forward = torch.func.jvp(function, (x.detach(),), (torch.ones(2, dtype=torch.float64),))
    gradient = torch.func.grad(function)
    _, mixed = torch.func.jvp(gradient, (x.detach(),), (torch.ones(2, dtype=torch.float64),))
    mapped = torch.vmap(gradient)(torch.stack([x.detach(), 2 * x.detach()]))
    factor = (size + 1) / 2
    found = {
        "value": value,
        "first": first,
        "second": second,
        "forward": forward,
        "mixed": mixed,
        "mapped": mapped,
    }
    return {"factor": factor, **{name: tensor.tolist() for name, tensor in found.items()}}


def steps_of(loss: Callable[[Tensor], Tensor], x: Tensor, **options: Any) -> Any:
    options = {"adjoint": todist.Replayed(snapshots=1), "steps": 4, **options}
    return todist.inner_loop(
        lambda w, _: loss(w),
        todist.sgd(lr=0.01),
        torch.ones(2, dtype=torch.float64, requires_grad=True),
        lambda number: number,
        meta=x,
        **options,
    )


def groups_and_optimizers() -> dict[str, Any]:
    """A mesh, a group of some ranks, a MetaOptimizer, autocast, and a check of the first step."""
    rank = dist.get_rank()
    x = torch.full((2,), 2.0, dtype=torch.float64, requires_grad=True)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("tasks", "data"))
    task, part = mesh.get_coordinate() or ()

    def loss(w: Tensor) -> Tensor:
        return ((w - x * (1 + task)) ** 2 * (1 + part)).sum()

    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    found: dict[str, Any] = {"task": task}
    for name, group in (("mesh", mesh["data"]), ("group", pair)):
        made = steps_of(
            loss, x, parallel=todist.DataParallel(group), adjoint=todist.Replayed(check=True, sharded=True)
        )
        found[name] = torch.autograd.grad(made.params.sum(), x)[0].tolist()
    made = steps_of(lambda w: ((w - x * (1 + task)) ** 2).sum() * 1.5, x)
    found["wanted"] = torch.autograd.grad(made.params.sum(), x)[0].tolist()
    try:
        todist.DataParallel(mesh)
    except ValueError as error:
        found["two dimensions"] = str(error)

    torch.manual_seed(0)
    model = nn.Linear(2, 2).double()
    for name, parallel in (("optimizer", todist.DataParallel()), ("optimizer alone", None)):
        module = nn.Linear(2, 2).double()
        module.load_state_dict(model.state_dict())
        optimizer = todist.MetaSGD(module, lr=0.1)
        optimizer.run(lambda m: (m(x) ** 2).sum(), 3, meta=x, parallel=parallel)
        found[name] = torch.autograd.grad((module(x) ** 2).sum(), x)[0].tolist()

    network = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    scale = torch.ones(2, requires_grad=True)
    torch.manual_seed(1)
    inputs = torch.randn(4, 2)
    for number, parameter in enumerate(network.parameters()):
        parameter.data.fill_(0.1 * (number + 1))
    for name, adjoint in (
        ("autocast", todist.Replayed(snapshots=1)),
        ("autocast recorded", todist.Recorded()),
    ):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            made = todist.inner_loop(
                lambda m: (m(inputs * scale) ** 2).mean(),
                todist.sgd(lr=0.1),
                network,
                3,
                meta=scale,
                adjoint=adjoint,
                parallel=todist.DataParallel(),
            )
            outer = (made.params(inputs) ** 2).mean()
        found[name] = torch.autograd.grad(outer, scale)[0].tolist()
    return found
