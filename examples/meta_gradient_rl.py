"""Discount and trace of a value function, learned while it learns, beside the best fixed ones.

    python examples/meta_gradient_rl.py
    torchrun --nproc_per_node=2 examples/meta_gradient_rl.py

Meta-gradient reinforcement learning (Xu, van Hasselt and Silver, 2018, https://arxiv.org/abs/1805.09801) lets an agent
learn what it learns from. Values move by one step towards a return that discount and trace define. The step is an inner
loop, differentiated by ``Recorded``: the error of the new values on the *next* episode, against the full return, has a
gradient to discount and trace, which follow it online. As in the paper's illustrations, both depend on the state.

Here an episode goes through eight states that pay 1 on average, and then through six that pay 0 on average, with much
noise. Every second state of the first eight looks the same as the others of these (aliased), so that its value is wrong
for each of them; all of the last six look the same (noisy). Good returns go through aliased states (trace 1), and stop
before noisy ones (discount 0). No pair of numbers does both.

Claim (Figure 1, and results on Atari games, which are out of reach here): discount and trace learned online beat the
best fixed ones. Here the best of 36 fixed pairs is chosen in hindsight. A run is a lifetime of 1,000 episodes, with the
same rewards for all; runs are spread over the workers, and a worker computes all of its runs at once.

Result: the squared error of the clear states' values, in the second half of the lifetime, is 1.12 with the best fixed
pair and 0.28 with the learned ones, which stop before noise (0.04) and go through aliased states (0.95). With smaller
steps (``--lr 0.02``) both are better, and the gain is smaller.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.func import grad

import torchopt_dist as todist

CLEAR, NOISY = 4, 6
"""States that look like no other, each followed by an aliased one; and at the end states of noise."""
ALIASED, NOISE = CLEAR, CLEAR + 1
SEEN = [look for state in range(CLEAR) for look in (state, ALIASED)] + [NOISE] * NOISY
"""What each state of an episode looks like: its place among the values."""
MEAN = torch.tensor([1.0] * 2 * CLEAR + [0.0] * NOISY, dtype=torch.float64)
DEVIATION = torch.tensor([1.0] * 2 * CLEAR + [3.0] * NOISY, dtype=torch.float64)
"""Of the reward on leaving each state."""
VALUES = MEAN.flip(0).cumsum(0).flip(0)[0 : 2 * CLEAR : 2]
"""The true ones of the clear states."""
FIXED = torch.tensor([0.0, 0.5, 0.75, 0.9, 0.95, 1.0], dtype=torch.float64)


class Targets(NamedTuple):
    """Logits of discount and of trace on entering a state, by what it looks like, of shape (CLEAR + 2,)."""

    discount: Tensor
    trace: Tensor


def returns(values: Tensor, rewards: Tensor, targets: Targets) -> Tensor:
    """The lambda-return from each state of an episode, of shape (states,)."""
    discount, trace = targets.discount.sigmoid(), targets.trace.sigmoid()
    found = [rewards[-1]]
    for reward, look in zip(rewards[:-1].flip(0).unbind(0), SEEN[:0:-1], strict=True):
        mixed = (1 - trace[look]) * values[look] + trace[look] * found[-1]
        found.append(reward + discount[look] * mixed)
    return torch.stack(found[::-1])


def loss(values: Tensor, wanted: Tensor) -> Tensor:
    """Half the squared error of an episode's values, against returns that are constants for them."""
    return (wanted - values[SEEN]).square().sum() / 2


def after_step(targets: Targets, values: Tensor, episodes: Tensor, lr: float) -> tuple[Tensor, Tensor]:
    """The loss of the second episode, against its full return, after a step on the first one; and the values then."""
    wanted = returns(values, episodes[0], targets)
    values = todist.inner_loop(
        lambda values: loss(values, wanted), todist.sgd(lr=lr), values, 1, adjoint=todist.Recorded()
    ).params
    return loss(values, episodes[1].flip(0).cumsum(0).flip(0)), values


def lifetime(
    rewards: Tensor, targets: Targets, learned: bool, args: argparse.Namespace
) -> tuple[Tensor, Tensor]:
    """Episodes' rewards, first targets → errors of the clear states' values, and discount and trace, on the way."""
    values = torch.zeros_like(targets.trace)
    optimizer = todist.adam(lr=args.meta_lr)
    state = optimizer.init(targets)
    errors, history = [], []
    for episodes in rewards.unfold(0, 2, 1).transpose(1, 2).unbind(0):
        if learned:
            gradient, values = grad(after_step, has_aux=True)(targets, values, episodes, args.lr)
            updates, state = optimizer.update(gradient, state)
            targets = todist.apply_updates(targets, updates, inplace=False)
        else:
            values = values - args.lr * grad(loss)(values, returns(values, episodes[0], targets))
        errors.append((values[:CLEAR] - VALUES).square().mean())
        history.append(torch.stack(targets).sigmoid())
    return torch.stack(errors), torch.stack(history)


@todist.parallelize(todist.tasks, todist.stack_reducer, vectorize=True)
def live(rewards: Tensor, targets: Targets, learned: bool, args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """The lifetimes of agents that meet the same rewards, one for each row of the targets."""
    return torch.vmap(lambda targets: lifetime(rewards, targets, learned, args))(targets)


def with_interval(runs: Tensor) -> str:
    """The mean over runs, and its 95 % interval."""
    return f"{runs.mean():.2f} ± {1.96 * runs.std() / len(runs) ** 0.5:.2f}"


@todist.rank_zero_only
def reproduce(args: argparse.Namespace) -> None:
    generator = torch.Generator().manual_seed(args.seed)
    noise = torch.randn(args.runs, args.episodes + 1, len(SEEN), generator=generator, dtype=torch.float64)
    rewards = MEAN + DEVIATION * noise
    pairs = torch.cartesian_prod(FIXED, FIXED)
    looks = torch.ones(CLEAR + 2, dtype=torch.float64)
    fixed = Targets(*(of[:, None] * looks for of in pairs.logit().unbind(1)))
    errors, _ = live(rewards, todist.replicated(fixed), False, args)
    halved = torch.full((1, CLEAR + 2), 0.5, dtype=torch.float64).logit()
    learned, history = live(rewards, todist.replicated(Targets(halved, halved)), True, args)

    late = slice(args.episodes // 2, None)
    by_pair = errors[..., late].mean(dim=-1)  # (runs, pairs)
    best, full = int(by_pair.mean(dim=0).argmin()), len(pairs) - 1
    own = learned[:, 0, late].mean(dim=-1)
    last = history[:, 0, -1].mean(dim=0)
    last = torch.cat([last[:, 1:CLEAR].mean(dim=1, keepdim=True), last[:, CLEAR:]], dim=1)
    looks_of = "(clear, aliased, noisy)"
    print(
        f"| learner | paper | squared error | less than the best | discount {looks_of} | trace {looks_of} |"
    )
    print("|---|---|---|---|---|---|")
    for name, pair in (("fixed, full return", full), ("fixed, the best of 36", best)):
        discount, trace = pairs[pair].tolist()
        print(f"| {name} | | {with_interval(by_pair[:, pair])} | | {discount:.2f} | {trace:.2f} |")
    shown = [f"{clear:.2f}, {aliased:.2f}, {noisy:.2f}" for clear, aliased, noisy in last.tolist()]
    gain = with_interval(by_pair[:, best] - own)
    print(f"| learned online | beats the best fixed | {with_interval(own)} | {gain} | {' | '.join(shown)} |")
    draw(errors[:, best], learned[:, 0], by_pair.mean(dim=0), own, history[:, 0].mean(dim=0), args.output)


def draw(best: Tensor, learned: Tensor, grid: Tensor, own: Tensor, history: Tensor, output: Path) -> None:
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    curves, map_, course = figure.subplots(1, 3)
    for runs, label in ((best, "best fixed"), (learned, "learned online")):
        curves.semilogy(runs.mean(dim=0).numpy(), label=label)
    curves.set(xlabel="episodes", ylabel="squared error of the clear states' values")
    curves.legend()
    image = map_.imshow(grid.reshape(len(FIXED), -1).log10().numpy(), origin="lower", cmap="viridis_r")
    marks = [f"{value:g}" for value in FIXED.tolist()]
    map_.set_xticks(range(len(FIXED)), marks)
    map_.set_yticks(range(len(FIXED)), marks)
    title = f"fixed pairs; learned: {float(own.mean().log10()):.2f}"
    map_.set(xlabel="trace", ylabel="discount", title=title)
    figure.colorbar(image, ax=map_, label="log10 of the squared error")
    for index, (name, style) in enumerate((("discount", "-"), ("trace", "--"))):
        clear = history[:, index, 1:CLEAR].mean(dim=1)
        aliased, noisy = history[:, index, ALIASED], history[:, index, NOISE]
        for look, of, colour in (("clear", clear, "C2"), ("aliased", aliased, "C4"), ("noisy", noisy, "C3")):
            course.plot(of.numpy(), style, color=colour, label=f"{name}, {look}")
    course.set(xlabel="episodes", title="as they are learned", ylim=(-0.02, 1.02))
    course.legend(fontsize=7, loc=(0.38, 0.36))
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)
    print(f"picture: {output}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Discount and trace learned online, beside fixed ones.")
    parser.add_argument("--runs", type=int, default=32, help="lifetimes of each (default: %(default)s)")
    parser.add_argument("--episodes", type=int, default=1000, help="of a lifetime (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=0.05, help="of the values (default: %(default)s)")
    parser.add_argument("--meta-lr", type=float, default=0.1, help="of Adam (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("outputs/meta_gradient_rl.png"), help="picture")
    return parser.parse_args()


@todist.auto_init_rpc(lambda: torch.set_num_threads(1))
def main() -> None:
    reproduce(parse_arguments())


if __name__ == "__main__":
    main()
