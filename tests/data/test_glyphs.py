"""Letters: the same pixels everywhere, no picture in two parts, drawn once; and errors that say what to write."""

from __future__ import annotations

import hashlib
import json
import pickle
import sys
import unicodedata
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import torch
from torch import Tensor

import torchopt_dist as todist
from torchopt_dist.data import Glyphs, GlyphSplit, TaskSampler, glyphs
from torchopt_dist.data import _drawing as drawing
from torchopt_dist.data import _drawing as faces

SMALL = {"train": ["GREEK"], "validation": ["COPTIC"], "test": ["ARMENIAN", "LISU"]}
MODULE = sys.modules[glyphs.__module__]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def letters(folder: Path) -> GlyphSplit:
    return glyphs(scripts=SMALL, drawings=12, cache=folder)


def test_every_machine_has_the_same_pixels(letters: GlyphSplit) -> None:
    """The digest is of matplotlib 3.9.2 with FreeType 2.6.1, and of 3.11.2 with 2.14.3."""
    parts = [(part.images.numpy().tobytes(), part.names) for part in letters]
    digest = hashlib.sha256(b"".join(pixels for pixels, _ in parts))
    digest.update(json.dumps([names for _, names in parts]).encode())
    assert digest.hexdigest() == "93a0395b04808a50f22c91bbb7bdd180c527a5bf8c636f36ff08f5a05188dc2b"


@pytest.fixture(scope="module")
def default(folder: Path) -> GlyphSplit:
    return glyphs(drawings=1, cache=folder)


def test_the_default_has_thousands_of_classes(default: GlyphSplit) -> None:
    assert [len(part.names) for part in default] == [4318, 875, 2228]
    for part, scripts in zip(default, MODULE.SCRIPTS.values(), strict=True):
        assert {script for name in part.names for script in scripts if name.startswith(script)} == {*scripts}


def test_letters_that_look_alike_are_one_class(default: GlyphSplit) -> None:
    names = set(default.train.names)
    alphas = {"LATIN CAPITAL LETTER A", "GREEK CAPITAL LETTER ALPHA", "CYRILLIC CAPITAL LETTER A"}
    assert len(names & alphas) == 1
    assert len(names & {"GREEK CAPITAL LETTER GAMMA", "CYRILLIC CAPITAL LETTER GHE"}) == 1
    assert "CYRILLIC CAPITAL LETTER ZHE" in names
    assert "LATIN CAPITAL LETTER O, turned by 180°" not in names  # it looks as before
    assert "LATIN CAPITAL LETTER L, turned by 180°" in names
    assert "LISU LETTER PA" not in default.test.names  # a Latin P
    assert "OLD ITALIC LETTER I" not in default.test.names


def test_the_class_of_several_parts_is_the_first_ones(folder: Path) -> None:
    scripts = {"train": ["GREEK"], "validation": ["COPTIC"], "test": ["LISU"]}
    names = [part.names for part in glyphs(scripts=scripts, drawings=1, rotations=False, cache=folder)]
    assert "GREEK CAPITAL LETTER RHO" in names[0]
    assert "LISU LETTER PA" not in names[2]
    assert not [name for part in names for name in part if "turned" in name]


def clean_pictures(part: Glyphs) -> dict[str, set[bytes]]:
    """Class → its undistorted pictures of all faces, as it is turned."""
    found: dict[str, set[bytes]] = {name: set() for name in part.names}
    split = [name.partition(", turned by ") for name in part.names]
    codes = sorted({ord(unicodedata.lookup(letter)) for letter, _, _ in split})
    for path in faces.dejavu():
        known = faces.outlines(path, [code for code in codes if code in faces.charmap(path)])
        shown = dict(zip(known, drawing.clean(list(known.values()), 28), strict=True))
        for letter, separator, turned in split:
            code = ord(unicodedata.lookup(letter))
            if code in shown:
                picture = np.rot90(shown[code], int(turned.rstrip("°") or 0) // 90)
                found[letter + separator + turned].add(picture.tobytes())
    return found


def test_no_picture_is_of_two_classes_and_none_of_two_parts(letters: GlyphSplit) -> None:
    owner: dict[bytes, str] = {}
    for part in letters:
        for name, shown in clean_pictures(part).items():
            assert shown
            for picture in shown:
                assert owner.setdefault(picture, name) == name


def test_a_nearest_neighbour_in_pixels_is_far_from_perfect(letters: GlyphSplit) -> None:
    tasks = TaskSampler(letters.test, ways=5, shots=1, queries=10).batch(range(100))
    nearest = torch.cdist(tasks.query.flatten(2), tasks.support.flatten(2)).argmin(-1)
    right = (tasks.support_labels.gather(1, nearest) == tasks.query_labels).float().mean()
    assert 0.3 < right < 0.7
    drawings = letters.test.images.flatten(0, 1).numpy()
    assert len({picture.tobytes() for picture in drawings}) == len(drawings)


def test_a_picture_does_not_depend_on_what_else_is_drawn(letters: GlyphSplit, folder: Path) -> None:
    other = glyphs(scripts={"test": ["ARMENIAN"]}, drawings=12, cache=folder).test
    name = "ARMENIAN CAPITAL LETTER BEN, turned by 90°"
    (one, _), (two, _) = (part[part.labels == part.names.index(name)] for part in (letters.test, other))
    assert len(one) == 12
    assert torch.equal(one, two)
    seeded = glyphs(scripts={"test": ["ARMENIAN"]}, drawings=12, seed=1, cache=folder).test
    assert not torch.equal(seeded[:12][0], other[:12][0])


def test_what_was_drawn_is_read_again_and_drawn_anew_where_it_is_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawn() -> Tensor:
        return glyphs(scripts={"test": ["COPTIC"]}, drawings=2, cache=tmp_path).test.images

    images = drawn()
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(MODULE, "outlines", None)  # nothing is drawn
        assert torch.equal(drawn(), images)
    middle = len(whole) // 2
    for torn in (b"", whole[:middle], whole[:middle] + b"?!" + whole[middle + 2 :], b"x" * 100):
        file.write_bytes(torn)
        assert torch.equal(drawn(), images)
        assert file.stat().st_size == len(whole)
    assert list(tmp_path.iterdir()) == [file]


def test_the_folder_is_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    glyphs(scripts={"train": ["COPTIC"]}, drawings=1)
    assert [path.suffix for path in (tmp_path / "xdg" / "torchopt_dist").iterdir()] == [".npz"]
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    glyphs(scripts={"train": ["COPTIC"]}, drawings=1)
    assert len(list((tmp_path / "home" / ".cache" / "torchopt_dist").iterdir())) == 1


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="could not keep its drawings .* as `cache`") as caught:
        split = glyphs(scripts={"train": ["COPTIC"]}, drawings=1, cache=tmp_path / "file")
    assert caught[0].filename == __file__
    assert len(split.train) == len(split.train.names) > 10


def test_parts_are_datasets(letters: GlyphSplit) -> None:
    part = letters.test
    picture, label = part[13]
    assert picture.shape == (1, 28, 28)
    assert picture.dtype == torch.float32
    assert 0 <= picture.min() < picture.max() <= 1
    assert (label, len(part)) == (1, 12 * len(part.names))
    batch, labels = part[[13, -1, 0]]
    assert labels.tolist() == [1, len(part.names) - 1, 0]
    for index, one in zip((13, -1, 0), batch, strict=True):
        assert torch.equal(part[index][0], one)
    assert torch.equal(part[torch.tensor([13])][0], part[13:14][0])
    with pytest.raises(IndexError, match=f"below {len(part)}"):
        part[len(part)]
    assert [len(pair) for pair in zip(*(part[i] for i in range(3)), strict=True)] == [3, 3]
    copy = pickle.loads(pickle.dumps(part))
    assert torch.equal(copy[40][0], part[40][0])
    assert "12 drawings of each, 28 pixels a side" in repr(part)


def test_a_turned_letter_is_turned_counter_clockwise(letters: GlyphSplit) -> None:
    part = letters.train
    upright = part.names.index("GREEK CAPITAL LETTER GAMMA") * 12
    for turns in (1, 2, 3):
        turned = part.names.index(f"GREEK CAPITAL LETTER GAMMA, turned by {90 * turns}°") * 12
        assert torch.equal(part[turned][0], part[upright][0].rot90(turns, (1, 2)))


def test_other_faces_and_sizes(tmp_path: Path) -> None:
    sans = [path for path in faces.dejavu() if path.stem.startswith("DejaVuSans-")]
    split = glyphs(
        16, {"train": ["COPTIC"]}, [*sans, str(sans[0])], drawings=3, least_faces=1, cache=tmp_path
    )
    assert split.train[0][0].shape == (1, 16, 16)
    cubic = next(Path(mpl.get_data_path(), "fonts").rglob("STIXGeneral.ttf"))
    assert (
        len(glyphs(12, {"train": ["GREEK"]}, [cubic], drawings=1, least_faces=1, cache=tmp_path).train) > 100
    )


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"size": 4}, ValueError, "`size` must be at least 8, got 4"),
        ({"size": 28.0}, TypeError, "`size` must be an integer, got float"),
        ({"drawings": 0}, ValueError, "`drawings` must be at least 1"),
        ({"seed": True}, TypeError, "`seed` must be an integer, got bool"),
        ({"least_faces": 13}, ValueError, "at least `least_faces` = 13 files, got 12: lower `least_faces`"),
        ({"scripts": ["LATIN"]}, TypeError, "`scripts` must be a mapping of parts to scripts"),
        ({"scripts": {"training": ["LATIN"]}}, ValueError, "got 'training': did you mean `train`?"),
        ({"scripts": {"train": "LATIN"}}, TypeError, r"write \['LATIN'\]"),
        ({"scripts": {"train": ["LATINA"]}}, ValueError, "got 'LATINA': did you mean `LATIN`?"),
        (
            {"scripts": {"train": ["TIFINAGH"]}},
            ValueError,
            "that at least 4 of the faces have, got 'TIFINAGH'",
        ),
        ({"scripts": {"train": ["GREEK"], "test": ["Greek"]}}, ValueError, "GREEK more than once"),
        ({"faces": "font.ttf"}, TypeError, r"write faces=\['font.ttf'\]"),
        ({"faces": ["nowhere.ttf"], "least_faces": 1}, ValueError, "there is no nowhere.ttf"),
        ({"faces": [__file__], "least_faces": 1}, ValueError, "`faces` must be files of fonts"),
        ({"sise": 28}, TypeError, "did you mean `size`?"),
    ],
)
def test_wrong_arguments(
    arguments: dict[str, Any], error: type[Exception], text: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=text.replace("?", r"\?")):
        glyphs(cache=tmp_path, **arguments)


def test_matplotlib_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        todist.data.glyphs()


def test_curves_of_each_degree_pass_through_their_middle() -> None:
    """Straight, quadratic and cubic, each from (0, 0) to (64, 0): the formula at 1/2."""
    paths = {
        (1, 2, 79): [[0, 0], [64, 0], [0, 0]],
        (1, 3, 3, 79): [[0, 0], [32, 64], [64, 0], [0, 0]],
        (1, 4, 4, 4, 79): [[0, 0], [0, 64], [64, 64], [64, 0], [0, 0]],
    }
    for (kinds, points), height in zip(paths.items(), (0, 32, 48), strict=True):
        corners, following, _ = faces._polygons(
            np.array(points), np.array(kinds, np.uint8), np.zeros(len(kinds), np.int64)
        )
        assert corners[[0, 2, 4]].tolist() == [[0, 0], [32 * 64, -height * 64], [64 * 64, 0]]
        assert following.tolist() == [1, 2, 3, 4, 5, 6, 7, 0]


def test_ink_is_the_area_of_a_polygon() -> None:
    square = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]], np.int64) * (faces.EM // 2)
    hole = square[::-1] // 2
    ring = faces.Outline(np.concatenate([square, hole]), np.array([1, 2, 3, 0, 5, 6, 7, 4]))
    twice = faces.Outline(np.concatenate([square, square]), np.array([1, 2, 3, 0, 5, 6, 7, 4]))
    for outline, ink in ((ring, 20 * 20 - 10 * 10), (twice, 20 * 20)):
        (picture,) = drawing.clean([outline], 28)
        assert picture.sum() == 255 * ink
        assert picture[4:24, 4:24].sum() == picture.sum()
