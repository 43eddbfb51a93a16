"""A function that need not be differentiable → the same function, with a gradient estimated from its values.

The gradient is that of the function smoothed by noise, ``E f(x + sigma · z)``, by evolution strategies (Salimans et
al., 2017, https://arxiv.org/abs/1703.03864). A sample is a seed, which determines its noise wherever and whenever the
sample is evaluated. So samples can be spread over workers: only seeds are sent and only numbers come back, and the
estimate does not depend on the number of workers.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, ParamSpec, TypeAlias

import torch
from torch import Size, Tensor
from torch.autograd.function import once_differentiable

from torchopt_dist import pytree
from torchopt_dist.arguments.numbers import integer
from torchopt_dist.core.rows import in_rows
from torchopt_dist.core.types import Samplable, SampleFunc
from torchopt_dist.torch_private import transforms_are_active

__all__ = ["Method", "zero_order"]

P = ParamSpec("P")

Method: TypeAlias = Literal["naive", "forward", "antithetic"]
"""What is subtracted from a sample's value: nothing, the value without noise, or that with the opposite noise."""

Parallel: TypeAlias = Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]
"""Function of seeds → the same function, evaluated in parts, the results concatenated."""


def zero_order(
    distribution: SampleFunc | Samplable,
    method: Method = "naive",
    argnums: int | Sequence[int] = (0,),
    num_samples: int = 1,
    sigma: float = 1.0,
    *,
    parallel: Parallel | None = None,
    vectorize: bool = False,
    chunk_size: int | None = None,
) -> Callable[[Callable[P, Any]], Callable[P, Any]]:
    """Decorate a function that returns a number: its gradient is estimated from its values at points nearby.

    The noise must have mean 0, variance 1 and no correlations. If it is normally distributed, the estimate is unbiased
    for the gradient of the smoothed function; for other noise its expectation tends to the function's own gradient as
    ``sigma`` goes to 0.

    Args:
        distribution: the distribution of the noise ``z``. It has a method ``sample(shape)``, such as
            ``torch.distributions.Normal(0.0, 1.0)``, or is a function, shape → tensor, such as ``torch.randn``.
        method: ``'naive'`` averages ``f(x + sigma · z) z / sigma``; ``'forward'`` subtracts ``f(x)`` first, which costs
            one evaluation; ``'antithetic'`` averages ``(f(x + sigma · z) - f(x - sigma · z)) z / 2 sigma``, which costs
            twice as many. The latter two vary much less.
        argnums: positions of the arguments that get a gradient; these are trees of tensors. Nothing else gets one.
        num_samples: how many samples are averaged.
        sigma: the scale of the noise, and so the width of the smoothing.
        parallel: how to spread the samples: a decorator for a function of a tensor of seeds, such as
            ``todist.parallelize(todist.batch_partitioner, todist.concatenate_reducer)``.
        vectorize: evaluate samples in one ``torch.vmap``, which the function must allow, instead of one after another.
        chunk_size: how many samples are evaluated at once, if vectorized; all, if not given.

    Returns:
        The decorator. The decorated function returns the mean over the samples. ``torch.manual_seed`` determines the
        noise.

    Raises:
        ValueError: ``method`` is unknown, ``num_samples`` or ``chunk_size`` is below 1, ``sigma`` is not above 0; or,
            in a call, there is no argument of that position, the function does not return one number, or noise has
            another shape than its tensor.
        NotImplementedError: in a call, a transform of ``torch.func`` is active.
        TypeError: ``distribution`` has no ``sample`` and is not a function, or an argument has the wrong type; or, in a
            call, a complex tensor is to get a gradient.

    Example:
        >>> import torch
        >>> _ = torch.manual_seed(0)
        >>> @zero_order(torch.distributions.Normal(0.0, 1.0), "antithetic", num_samples=1000, sigma=0.1)
        ... def loss(x):
        ...     return (x**2).sum()
        >>> x = torch.tensor([1.0, -2.0], requires_grad=True)
        >>> [round(value) for value in torch.autograd.grad(loss(x), x)[0].tolist()]
        [2, -4]
    """
    if method not in ("naive", "forward", "antithetic"):
        raise ValueError(f"`method` must be 'naive', 'forward' or 'antithetic', got {method!r}")
    for name, number in (("num_samples", num_samples), ("chunk_size", chunk_size)):
        if number is None and name == "chunk_size":
            continue
        integer(name, number, 1)
    if not (sigma > 0 and math.isfinite(sigma)):
        raise ValueError(f"`sigma` must be finite and above 0, got {sigma}")
    draw = getattr(distribution, "sample", distribution)
    if not callable(draw):
        raise TypeError(
            f"`distribution` must have a method `sample`, or be a function of a shape, got {distribution!r:.80}"
        )
    several: Any = argnums if isinstance(argnums, (tuple, list)) else (argnums,)
    places = list(several)
    if not places or any(isinstance(n, bool) or not isinstance(n, int) for n in places):
        raise TypeError(f"`argnums` must be an integer or a sequence of them, got {argnums!r}")
    if parallel is not None and not callable(parallel):
        raise TypeError(f"`parallel` must be a decorator, got {parallel!r:.80}")
    settings = _Settings(draw, method, num_samples, float(sigma), parallel, vectorize, chunk_size)

    def decorate(function: Callable[P, Any]) -> Callable[P, Any]:
        if not callable(function):
            raise TypeError(f"`zero_order` decorates a function, got {type(function).__name__}")

        @functools.wraps(function, updated=())
        def estimated(*args: P.args, **kwargs: P.kwargs) -> Any:
            if not all(-len(args) <= n < len(args) for n in places):
                raise ValueError(
                    f"`argnums` must be positions among the {len(args)} arguments, got {argnums}"
                )
            return estimate(function, args, kwargs, [n % len(args) for n in places], settings)

        return estimated

    return decorate


@dataclass(frozen=True)
class _Settings:
    draw: Callable[[Size], Any]
    method: Method
    num_samples: int
    sigma: float
    parallel: Parallel | None
    vectorize: bool
    chunk_size: int | None


def estimate(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    places: Sequence[int],
    settings: _Settings,
) -> Tensor:
    """The mean value over the samples, connected with the tensors in the ``places`` among ``args``."""
    if transforms_are_active():
        raise NotImplementedError(
            "a function with `zero_order` does not run inside torch.func's transforms, such as `vmap`: call it outside "
            "of them, for one task after another"
        )
    chosen: Any = [args[n] for n in places]
    leaves, spec = pytree.flatten(chosen)
    ours = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not ours:
        raise ValueError(f"the arguments {list(places)} must have a floating-point tensor among them")
    if any(isinstance(leaf, Tensor) and leaf.is_complex() and leaf.requires_grad for leaf in leaves):
        raise TypeError(
            f"the arguments {list(places)} must have no complex tensor that requires grad, since there is no estimate "
            "for it: pass `torch.view_as_real(...)` of it"
        )
    rest = [None if n in set(ours) else leaf for n, leaf in enumerate(leaves)]
    given: Any = [list(args), kwargs]
    cut, named = pytree.map_tensors(Tensor.detach, given)
    call = _Call(function, cut, named, list(places), spec, rest, ours)
    value: Tensor = _Estimate.apply(call, settings, *[leaves[n] for n in ours])
    return value


@dataclass
class _Call:
    """A call of a function, some of whose tensors are given later."""

    function: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    places: list[int]
    spec: pytree.PyTreeSpec
    rest: list[Any]
    ours: list[int]

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        leaves = list(self.rest)
        for place, tensor in zip(self.ours, tensors, strict=True):
            leaves[place] = tensor
        args = list(self.args)
        for place, argument in zip(self.places, pytree.unflatten(self.spec, leaves), strict=True):
            args[place] = argument
        value = self.function(*args, **self.kwargs)
        value = value if isinstance(value, Tensor) else torch.as_tensor(value)
        if value.numel() != 1:
            raise ValueError(
                f"the function must return one number, got a tensor of shape {tuple(value.shape)}"
            )
        return value.detach().reshape(())

    def without(self) -> _Call:
        """The same call without the arguments that are replaced, so that these are not sent."""
        args = [None if n in set(self.places) else arg for n, arg in enumerate(self.args)]
        return _Call(self.function, args, self.kwargs, self.places, self.spec, self.rest, self.ours)


@dataclass
class _Samples:
    """Seeds → values, of shape (samples, 1), or of shape (samples, 2) for antithetic pairs."""

    call: _Call
    tensors: list[Tensor]
    draw: Callable[[Size], Any]
    sigma: float
    signs: tuple[int, ...]
    vectorize: bool
    chunk_size: int | None

    def __call__(self, seeds: Tensor) -> Tensor:
        with torch.no_grad():
            at_once = self.chunk_size or len(seeds) if self.vectorize else _drawn_at_once(self.tensors)
            return torch.cat([self._batch(chunk.tolist()) for chunk in seeds.split(at_once)])

    def _batch(self, seeds: Sequence[int]) -> Tensor:
        noise = noise_of(seeds, self.tensors, self.draw)
        if self.vectorize:
            return torch.vmap(self._values, randomness="different")(noise)
        return torch.stack([self._values(sample) for sample in zip(*noise, strict=True)])

    def _values(self, noise: Sequence[Tensor]) -> Tensor:
        return torch.stack(
            [
                self.call([t + sign * self.sigma * z for t, z in zip(self.tensors, noise, strict=True)])
                for sign in self.signs
            ]
        )


_drawing = threading.Lock()


def noise_of(
    seeds: Sequence[int], tensors: Sequence[Tensor], draw: Callable[[Size], Any] | None = None
) -> list[Tensor]:
    """For each tensor the noise that belongs to the seeds, stacked; the same on every machine.

    Torch's generators are left as they were.

    Args:
        seeds: one for each sample.
        tensors: tensors with the shapes, dtypes and devices of the noise.
        draw: shape → noise, from torch's generators; if not given, the noise is normal and comes from a separate
            generator, with which other threads of a worker cannot interfere.
    """
    drawn = [_normal(seed, tensors) for seed in seeds] if draw is None else _drawn(seeds, tensors, draw)
    return [
        torch.stack(samples).to(tensor)
        for samples, tensor in zip(zip(*drawn, strict=True), tensors, strict=True)
    ]


def _normal(seed: int, tensors: Sequence[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu")

    return [
        torch.view_as_complex(normal(*tensor.shape, 2)) if tensor.is_complex() else normal(*tensor.shape)
        for tensor in tensors
    ]


def _drawn(
    seeds: Sequence[int], tensors: Sequence[Tensor], draw: Callable[[Size], Any]
) -> list[list[Tensor]]:
    gpus = sorted({tensor.device.index for tensor in tensors if tensor.is_cuda})
    drawn: list[list[Tensor]] = []
    # A process has one generator, and a worker may evaluate several tasks in threads.
    with _drawing, torch.random.fork_rng(gpus):
        for seed in seeds:
            torch.default_generator.manual_seed(seed)
            for gpu in gpus:
                torch.cuda.default_generators[gpu].manual_seed(seed)
            drawn.append([torch.as_tensor(draw(tensor.shape)) for tensor in tensors])
    for sample, tensor in zip(drawn[0], tensors, strict=True):
        if sample.shape != tensor.shape:
            raise ValueError(
                "`distribution` must give samples of the shape that it is asked for, "
                f"{tuple(tensor.shape)}, got {tuple(sample.shape)}"
            )
    return drawn


def weighted_noise(
    seeds: Sequence[int],
    weights: Tensor,
    tensors: Sequence[Tensor],
    draw: Callable[[Size], Any] | None = None,
) -> list[Tensor]:
    """For each tensor the sum of the seeds' noise, each times its weight."""
    totals = [torch.zeros_like(tensor) for tensor in tensors]
    at_once = _drawn_at_once(tensors)
    for start in range(0, len(seeds), at_once):
        part = slice(start, start + at_once)
        for total, z in zip(totals, noise_of(seeds[part], tensors, draw), strict=True):
            with torch.autocast(z.device.type, enabled=False):
                total.add_(torch.tensordot(weights[part].to(z), z, dims=1))
    return totals


def _drawn_at_once(tensors: Sequence[Tensor]) -> int:
    """For how many seeds the noise is drawn at once: as many as have 65,536 numbers together, at least one."""
    return max(1, 2**16 // max(1, sum(tensor.numel() for tensor in tensors)))


class _Estimate(torch.autograd.Function):
    apply: ClassVar[Any]

    @staticmethod
    def forward(ctx: Any, call: _Call, settings: _Settings, *tensors: Tensor) -> Tensor:
        cut = [tensor.detach() for tensor in tensors]
        signs = (1, -1) if settings.method == "antithetic" else (1,)
        samples = _Samples(
            call.without(),
            cut,
            settings.draw,
            settings.sigma,
            signs,
            settings.vectorize,
            settings.chunk_size,
        )
        evaluate: Callable[[Tensor], Tensor] = samples
        if settings.parallel is not None:
            evaluate = settings.parallel(samples)
        seeds = torch.randint(2**62, (settings.num_samples,), device="cpu")
        values = evaluate(seeds).to(cut[0].device)
        if settings.method == "antithetic":
            weights = (values[:, 0] - values[:, 1]) / 2
        else:
            weights = values[:, 0] - (call(cut) if settings.method == "forward" else 0)
        ctx.save_for_backward(*cut)
        ctx.seeds, ctx.weights = seeds.tolist(), weights / (settings.sigma * settings.num_samples)
        ctx.draw = settings.draw
        return values.mean()

    @staticmethod
    @once_differentiable
    @in_rows
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        found = weighted_noise(ctx.seeds, ctx.weights * grad, ctx.saved_tensors, ctx.draw)
        return None, None, *found
