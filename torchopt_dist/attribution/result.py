"""Scores of examples for queries → the names of those that matter, a table, a picture, a file."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchopt_dist.attribution import _safetensors

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Attribution"]


@dataclass(frozen=True)
class Attribution:
    """The scores of training examples for queries; what :func:`~torchopt_dist.attribute` returns."""

    scores: Tensor
    """Of shape (queries, examples), (queries, groups) or (queries, examples, tokens): how the query's loss grows with
    the weight. Negative: the example helps."""
    query_losses: Tensor
    """The losses after the training, of shape (queries,)."""
    method: str
    """By which method the scores were made."""
    names: tuple[str, ...]
    """Of the examples, or of the groups."""
    query_names: tuple[str, ...]
    """Of the queries."""

    @property
    def per_example(self) -> Tensor:
        """The scores, those of an example's tokens summed."""
        return self.scores.flatten(2).sum(2) if self.scores.ndim > 2 else self.scores

    def top(self, k: int = 10, query: int | None = None) -> list[tuple[str, float]]:
        """The ``k`` examples that help most, with their scores, the most negative first.

        Args:
            k: how many.
            query: the number of a query; ``None``: the mean over all.
        """
        return self._sorted(k, query, descending=False)

    def bottom(self, k: int = 10, query: int | None = None) -> list[tuple[str, float]]:
        """The ``k`` examples that harm most, with their scores, the highest first.

        Args:
            k: how many.
            query: the number of a query; ``None``: the mean over all.
        """
        return self._sorted(k, query, descending=True)

    def _sorted(self, k: int, query: int | None, *, descending: bool) -> list[tuple[str, float]]:
        scores = self.per_example.mean(0) if query is None else self.per_example[query]
        order = scores.argsort(descending=descending, stable=True)[:k].tolist()
        return [(self.names[place], scores[place].item()) for place in order]

    def table(self, k: int = 3, queries: Sequence[int] | None = None) -> str:
        """A text with a line for each query: its loss, and the ``k`` examples that help and that harm it most.

        Args:
            k: how many examples of each kind.
            queries: the numbers of the queries; all, if not given.
        """
        chosen = range(len(self.query_names)) if queries is None else queries

        def listed(found: list[tuple[str, float]]) -> str:
            return ", ".join(f"{name} ({score:+.2g})" for name, score in found)

        rows = [("query", "loss", "help most", "harm most")]
        for query in chosen:
            loss = f"{self.query_losses[query].item():.4g}"
            kinds = listed(self.top(k, query)), listed(self.bottom(k, query))
            rows.append((self.query_names[query], loss, *kinds))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
        ]
        return "\n".join(line.rstrip() for line in lines)

    def plot(
        self, path: str | os.PathLike[str] | None = None, *, k: int = 10, query: int | None = None
    ) -> Figure:
        """Draw the scores of all examples in their order, and by name those that help and harm most.

        Args:
            path: where to save the picture, in the format that its suffix names; ``None`` saves none.
            k: how many examples have their names in it, of each kind.
            query: the number of a query; ``None``: the mean over all.

        Returns:
            The figure.

        Raises:
            ImportError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("`plot` needs matplotlib: pip install matplotlib; or use `table`") from error
        figure = Figure(figsize=(10, 1.5 + 0.3 * k), layout="constrained")
        left, right = figure.subplots(1, 2)
        scores = self.per_example.mean(0) if query is None else self.per_example[query]
        of = "the mean of all queries" if query is None else f"query {self.query_names[query]}"
        left.plot(scores.sort().values.tolist())
        left.axhline(0, color="grey", linewidth=0.5)
        left.set(xlabel="examples, sorted", ylabel="score", title=f"Scores for {of}, {self.method}")
        count = min(k, len(scores) // 2)
        named = [*self.top(count, query), *reversed(self.bottom(count, query))]
        colors = ["tab:green" if score < 0 else "tab:red" for _, score in named]
        right.barh(range(len(named)), [score for _, score in named], color=colors)
        right.set_yticks(range(len(named)), [name for name, _ in named])
        right.invert_yaxis()
        right.set(xlabel="score: negative helps", title="What helps and what harms most")
        if path is not None:
            figure.savefig(path)
        return figure

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file in the safetensors format, which other programs read, too.

        Args:
            path: its name.

        Raises:
            OSError: it cannot be written; a file of that name is as it was.
        """
        texts = {"method": self.method, "names": json.dumps(self.names)}
        texts["query_names"] = json.dumps(self.query_names)
        tensors = {"scores": self.scores, "query_losses": self.query_losses}
        _safetensors.write(path, tensors, texts)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Attribution:
        """Read a file of :meth:`save`.

        Args:
            path: its name.

        Raises:
            OSError: it cannot be read.
            ValueError: it is torn, or holds something else.
        """
        tensors, texts = _safetensors.read(path)
        try:
            names, query_names = (tuple(json.loads(texts[key])) for key in ("names", "query_names"))
            made = cls(tensors["scores"], tensors["query_losses"], texts["method"], names, query_names)
        except (KeyError, ValueError) as error:
            raise ValueError(
                f"{os.fspath(path)!r} must be a file of Attribution.save: it lacks {error}"
            ) from error
        if made.scores.shape[:2] != torch.Size([len(query_names), len(names)]):
            raise ValueError(f"{os.fspath(path)!r} must have a score for each query and each name")
        return made
