"""What scores show: names, a table, a picture, and a file that other programs read."""

from __future__ import annotations

import builtins
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from torchopt_dist.attribution import Attribution, _safetensors

FOUND = Attribution(
    scores=torch.tensor([[0.5, -2.0, 1.0], [0.0, -1.0, 3.0]]),
    query_losses=torch.tensor([0.25, 1.5]),
    method="exact",
    names=("cat", "dog", "cow"),
    query_names=("first", "second"),
)


def test_what_helps_and_what_harms() -> None:
    assert FOUND.top(1) == [("dog", -1.5)]
    assert FOUND.bottom(2) == [("cow", 2.0), ("cat", 0.25)]
    assert FOUND.top(2, query=1) == [("dog", -1.0), ("cat", 0.0)]
    assert [name for name, _ in FOUND.bottom(9, query=0)] == ["cow", "cat", "dog"]
    of_tokens = Attribution(FOUND.scores[..., None] / 2 * torch.ones(2), *list(vars(FOUND).values())[1:])
    assert of_tokens.top(1) == [("dog", -1.5)]
    assert torch.equal(of_tokens.per_example, FOUND.scores)


def test_the_table_has_a_line_for_each_query() -> None:
    assert FOUND.table(k=1).splitlines() == [
        "query   loss  help most  harm most",
        "first   0.25  dog (-2)   cow (+1)",
        "second  1.5   dog (-1)   cow (+3)",
    ]
    assert FOUND.table(k=1, queries=[1]).splitlines()[1:] == ["second  1.5   dog (-1)   cow (+3)"]


def test_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = FOUND.plot(tmp_path / "scores.png", k=1)
    assert (tmp_path / "scores.png").read_bytes().startswith(b"\x89PNG")
    assert [label.get_text() for label in figure.axes[1].get_yticklabels()] == ["dog", "cow"]
    assert "second" in FOUND.plot(query=1).axes[0].get_title()
    own = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return own(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        FOUND.plot()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_file_gives_the_same(dtype: torch.dtype, tmp_path: Path) -> None:
    path = tmp_path / "new" / "scores.safetensors"
    given = Attribution(FOUND.scores.to(dtype).T.contiguous().T, *list(vars(FOUND).values())[1:])
    given.save(path)
    found = Attribution.load(path)
    assert torch.equal(found.scores, given.scores)
    assert found.scores.dtype == dtype
    assert torch.equal(found.query_losses, FOUND.query_losses)
    assert (found.method, found.names, found.query_names) == ("exact", FOUND.names, FOUND.query_names)
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_the_library_reads_the_file(tmp_path: Path) -> None:
    FOUND.save(tmp_path / "scores")
    assert torch.equal(safetensors.torch.load_file(tmp_path / "scores")["scores"], FOUND.scores)
    safetensors.torch.save_file({"a": torch.arange(3), "none": torch.zeros(0, 2)}, tmp_path / "other")
    found, texts = _safetensors.read(tmp_path / "other")
    assert found["a"].tolist() == [0, 1, 2]
    assert found["none"].shape == (0, 2)
    assert texts == {}


def test_without_the_library_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("safetensors", "safetensors.torch"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"pip install 'torchopt_dist\[attribution\]'"):
        FOUND.save(tmp_path / "scores")
    with pytest.raises(ImportError, match=r"pip install 'torchopt_dist\[attribution\]'"):
        Attribution.load(tmp_path / "scores")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda data: data[:-1], "is torn"),
        (lambda data: data[:20], "is torn"),
        (lambda data: b"", "is torn"),
        (lambda data: b"PK\x03\x04" + data, "is torn"),
        (lambda data: data.replace(b"F32", b"F99"), "is torn"),
        (lambda data: data.replace(b"query_names", b"query_nemas"), "a file of .*: it lacks 'query_names'"),
        (lambda data: data.replace(b"[2,3]", b"[3,2]"), "a score for each query and each name"),
    ],
)
def test_torn_and_foreign_files_are_named_errors(change: Any, text: str, tmp_path: Path) -> None:
    path = tmp_path / "scores"
    FOUND.save(path)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=text) as caught:
        Attribution.load(path)
    assert str(path) in str(caught.value)


def test_a_file_that_cannot_be_written_is_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "scores"
    FOUND.save(path)
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        FOUND.save(path)
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["scores"]
