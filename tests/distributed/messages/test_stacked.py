"""Tasks that are rows of a batch and run in one ``vmap`` are sent as one tensor; values and gradients are the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import torchopt_dist as todist
from torchopt_dist.distributed.messages.stacked import Rows, Stacked

RUN = todist.auto_init_rpc()


@dataclass
class Batch:
    x: Tensor
    name: str = "a batch"


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Stacked]:
    """What rows were sent as."""
    made: list[Stacked] = []
    between = Rows.between

    def noted(rows: Rows, start: int, stop: int) -> Stacked:
        made.append(between(rows, start, stop))
        return made[-1]

    monkeypatch.setattr(Rows, "between", noted)
    return made


def quartic(scale: Tensor, x: Any, *, y: Tensor) -> dict[str, Tensor]:
    x = x.x if isinstance(x, Batch) else x
    return {"sum": (scale * x**2 * y).sum(), "rows": x * y}


def of_one_process(scale: Tensor, x: Tensor, y: Tensor, dim: int) -> dict[str, Tensor]:
    each = [quartic(scale, *pair[:1], y=pair[1]) for pair in zip(x.unbind(dim), y.unbind(dim), strict=True)]
    return {key: torch.stack([value[key] for value in each]).mean(dim=0) for key in each[0]}


def grads(value: dict[str, Tensor], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """First and second derivatives."""
    first = torch.autograd.grad(value["sum"] + value["rows"].square().sum(), inputs, create_graph=True)
    return [*first, *torch.autograd.grad(sum(grad.square().sum() for grad in first), inputs)]


@pytest.mark.parametrize("isolated", [True, False])
@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("dim", [0, 1])
def test_rows_are_sent_as_one_tensor_with_derivatives_to_second_order(
    sent: list[Stacked], dim: int, wrapped: bool, isolated: bool
) -> None:
    @RUN
    def main() -> None:
        torch.manual_seed(0)
        scale, x, y = (torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in (1, 4, 4))
        inputs = scale, x, y
        expected = of_one_process(scale[0] if dim == 0 else scale[0, :1], x, y, dim)
        spread = todist.parallelize(
            todist.dim_partitioner(dim, exclusive=True, keepdim=False),
            todist.mean_reducer,
            vectorize=True,
            isolate_own_share=isolated,
        )(quartic)
        shared: Any = todist.replicated(scale[0] if dim == 0 else scale[0, :1])
        made: Any = spread(shared, Batch(x) if wrapped else x, y=y)
        torch.testing.assert_close(made, expected)
        torch.testing.assert_close(grads(made, inputs), grads(expected, inputs))

    main()
    ((_, places),) = sent
    assert len(places) == 2


@dataclass
class _OwnPartitioner:
    """Adds a number to the arguments of the parts that the package's own partitioner makes."""

    def __call__(self, x: Tensor) -> list[todist.typing.Partition]:
        parts = todist.tasks(x)
        for part in parts:
            part.kwargs["more"] = 1.0
        return parts


@pytest.mark.parametrize(
    ("partitioner", "args"),
    [
        (_OwnPartitioner(), ()),
        (todist.tasks, (todist.replicated([1.0]),)),
        (todist.tasks, (print,)),
    ],
    ids=["a user's own", "a list", "a function"],
)
def test_other_arguments_are_stacked_by_the_worker(sent: list[Stacked], partitioner: Any, args: Any) -> None:
    @RUN
    def main() -> None:
        x = torch.arange(6.0).reshape(3, 2)
        spread = todist.parallelize(partitioner, todist.stack_reducer, vectorize=True)(_add)
        torch.testing.assert_close(spread(x, *args), x.sum(dim=1) + 1.0)

    main()
    assert not sent


def test_one_row_is_a_task_of_its_own(sent: list[Stacked]) -> None:
    @RUN
    def main() -> None:
        x = torch.arange(2.0).reshape(2, 1)
        spread = todist.parallelize(
            todist.dim_partitioner(1, exclusive=True, keepdim=False), todist.stack_reducer, vectorize=True
        )(_add)
        torch.testing.assert_close(spread(x, more=2.0), x.sum(dim=0) + 2.0)

    main()
    assert not sent


def _add(x: Tensor, *_: Any, more: float = 1.0) -> Tensor:
    return x.sum() + more


def test_values_may_be_changed_in_place() -> None:
    @RUN
    def main() -> None:
        rows: Any = todist.parallelize(todist.tasks, vectorize=True)(lambda x: 2 * x)(torch.ones(3, 2))
        rows[0].add_(1.0)
        assert rows[0].tolist() == [3.0, 3.0]
        assert rows[1].tolist() == [2.0, 2.0]

    main()
