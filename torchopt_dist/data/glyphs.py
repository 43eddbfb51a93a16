"""Faces of fonts → letters of many scripts to learn from few examples, split by script; drawn once and kept."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import unicodedata
import warnings
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from torchopt_dist.arguments.numbers import integer
from torchopt_dist.arguments.options import close_to
from torchopt_dist.data._drawing import (
    Integers,
    Outline,
    Pictures,
    charmap,
    clean,
    dejavu,
    distorted,
    outlines,
    random_numbers,
)

__all__ = ["GlyphSplit", "Glyphs", "glyphs"]

VERSION = 1
"""Raise this where the same arguments give other pixels: what was kept before is then drawn anew."""
PARTS = ("train", "validation", "test")
SCRIPTS = {
    "train": ("LATIN", "GREEK", "CYRILLIC"),
    "validation": ("ARABIC", "HEBREW"),
    "test": ("ARMENIAN", "GEORGIAN", "CANADIAN SYLLABICS", "LAO", "LISU", "COPTIC", "OLD ITALIC"),
}
LETTERS = ("Lu", "Ll", "Lt", "Lo")
SIDE, LEVELS, ALIKE = 16, 16, 50
"""Two letters are one picture if so many squared pixels have at most one squared difference, at this side and depth."""

Known = list[Mapping[int, Outline]]
"""For each face its outlines."""


class Glyphs(Dataset[tuple[Tensor, int]]):
    """Labelled pictures of letters: a dataset of torch, for :class:`TaskSampler` and for ordinary training.

    ``dataset[i]`` is a picture of shape (1, size, size), from 0 (paper) to 1 (ink), and its label; ``dataset[indices]``
    is a batch of them.

    Args:
        images: of shape (letters, drawings, size, size), of dtype ``uint8``.
        letters: for each class its letter, an index into ``images``.
        turns: for each class by how many quarters the letter is turned, counter-clockwise.
        names: for each letter its name in Unicode.
    """

    def __init__(
        self, images: Tensor, letters: Sequence[int], turns: Sequence[int], names: Sequence[str]
    ) -> None:
        self.images = images
        self.labels = torch.arange(len(letters)).repeat_interleave(images.shape[1])
        self._letters, self._turns = torch.tensor(letters).long(), torch.tensor(turns).long()
        self._names = list(names)

    @property
    def names(self) -> list[str]:
        """For each label the letter's name in Unicode, and how far it is turned."""
        turned = ("", ", turned by 90°", ", turned by 180°", ", turned by 270°")
        pairs = zip(self._letters.tolist(), self._turns.tolist(), strict=True)
        return [self._names[letter] + turned[turns] for letter, turns in pairs]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Any) -> Any:
        """A picture and its label; or those of several indices, stacked."""
        if isinstance(index, Integral):
            place = integer("index", index, None)
            if not -len(self) <= place < len(self):
                raise IndexError(f"`index` must be below {len(self)}, the number of pictures, got {place}")
            number, which = divmod(place % len(self), self.images.shape[1])
            turned = self.images[self._letters[number], which].rot90(int(self._turns[number]))
            return turned[None] / 255, number
        indices = torch.arange(len(self))[index]
        label, drawing = indices // self.images.shape[1], indices % self.images.shape[1]
        upright, turns = self.images[self._letters[label], drawing], self._turns[label]
        # Each of the four is taken for all: four quick copies instead of a gather of pixels.
        pictures = torch.stack([upright.rot90(quarters, (-2, -1)) for quarters in range(4)])
        return pictures[turns, torch.arange(len(turns))][:, None] / 255, label

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int]]:
        """The pairs of several indices, as a ``DataLoader`` asks for them."""
        pictures, labels = self[indices]
        return list(zip(pictures, labels.tolist(), strict=True))

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({len(self._letters)} classes of {len(self._names)} letters, "
            f"{self.images.shape[1]} drawings of each, {self.images.shape[-1]} pixels a side)"
        )


class GlyphSplit(NamedTuple):
    """Letters of other scripts in each part; no picture of a letter is in two of them."""

    train: Glyphs
    """Latin, Greek and Cyrillic letters, if ``scripts`` does not say otherwise."""
    validation: Glyphs
    """Arabic and Hebrew."""
    test: Glyphs
    """Armenian, Georgian, Canadian syllabics, Lao, Lisu, Coptic, Old Italic."""


def glyphs(
    size: int = 28,
    scripts: Mapping[str, Sequence[str]] | None = None,
    faces: Iterable[str | os.PathLike[str]] | None = None,
    *,
    drawings: int = 20,
    rotations: bool = True,
    least_faces: int = 4,
    seed: int = 0,
    cache: str | os.PathLike[str] | None = None,
) -> GlyphSplit:
    """Letters of a dozen scripts for few-shot learning, of the faces that matplotlib ships: nothing is downloaded.

    The shape of the problem is that of Omniglot: thousands of classes with 20 drawings each, and scripts for tests that
    training never sees. A letter is drawn from each face in turn, turned, sheared, moved, resized and bent a little,
    with noise. **Letters that look alike in a face are one class**, such as the capital A of Latin, Greek and Cyrillic;
    if ``rotations``, u and a turned n, too. Such a class is of the first part that has it, so no picture of a letter is
    in two parts.

    The first call takes some 15 seconds and keeps the drawings, 30 MB, in a folder of the user's; later calls read
    them. Only the outlines are read from the faces, and all that follows is arithmetic of integers: **the pixels are
    the same on every machine**, for the same files of faces.

    Args:
        size: the side of a picture, in pixels.
        scripts: ``"train"``, ``"validation"`` and ``"test"`` → scripts, as Unicode's names of letters begin; a part
            that is left out is empty. If not given, the parts are those of :class:`GlyphSplit`.
        faces: files of fonts with outlines (TrueType or OpenType); if not given, the twelve DejaVu faces of matplotlib.
            ``matplotlib.font_manager.findSystemFonts()`` lists those of the system.
        drawings: the number of pictures of each class.
        rotations: whether a letter turned by 90, 180 and 270 degrees is a class of its own.
        least_faces: a letter is used if so many faces have it.
        seed: of the distortions and the noise.
        cache: the folder to keep the drawings in; if not given, ``torchopt_dist`` in ``$XDG_CACHE_HOME`` or
            ``~/.cache``.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError: an argument is of the wrong kind.
        ValueError: a number is too small; a part or a script is not known, or a script is in two parts; a face is no
            font with outlines.

    Example:
        >>> import torchopt_dist as todist
        >>> letters = todist.data.glyphs()  # doctest: +SKIP
        >>> tasks = todist.data.TaskSampler(letters.train, ways=5, shots=1, queries=15)  # doctest: +SKIP
        >>> tasks[0].support.shape  # doctest: +SKIP
        torch.Size([5, 1, 28, 28])
    """
    size, drawings = integer("size", size, 8), integer("drawings", drawings, 1)
    least_faces, seed = integer("least_faces", least_faces, 1), integer("seed", seed, 0)
    paths = _faces(faces, least_faces)
    letters = _letters(_scripts(scripts), [charmap(path) for path in paths], least_faces)
    what = {
        "version": VERSION,
        "size": size,
        "faces": [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths],
        "letters": letters,
        "drawings": drawings,
        "rotations": bool(rotations),
        "least_faces": least_faces,
        "seed": seed,
    }
    key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
    file = (Path(cache) if cache is not None else _user_cache()) / f"glyphs-{key[:24]}.npz"
    kept = _read(file, size, drawings)
    if kept is None:
        kept = _drawn(letters, paths, what)
        _keep(kept, file)
    parts = []
    for part in PARTS:
        codes, classes = kept[f"{part}_codes"], kept[f"{part}_classes"]
        names = [unicodedata.name(chr(code)) for code in codes.tolist()]
        images = torch.from_numpy(kept[f"{part}_images"])
        parts.append(Glyphs(images, classes[:, 0].tolist(), classes[:, 1].tolist(), names))
    return GlyphSplit(*parts)


# --- Which letters --------------------------------------------------------------------------------------------


def _faces(faces: Iterable[str | os.PathLike[str]] | None, least: int) -> list[Path]:
    shipped = dejavu()
    if isinstance(faces, (str, os.PathLike)):
        raise TypeError(f"`faces` must be a list of files, got one: write faces=[{str(faces)!r}]")
    paths = shipped if faces is None else [Path(face) for face in faces]
    if missing := [str(path) for path in paths if not path.is_file()]:
        raise ValueError(f"`faces` must be files of fonts, and there is no {missing[0]}")
    if len(paths) < least:
        raise ValueError(
            f"`faces` must have at least `least_faces` = {least} files, got {len(paths)}: lower `least_faces`, with "
            "which a letter needs fewer"
        )
    return paths


def _scripts(scripts: Mapping[str, Sequence[str]] | None) -> dict[str, list[str]]:
    """Part → scripts, in capitals."""
    asked = SCRIPTS if scripts is None else scripts
    if not isinstance(asked, Mapping):
        raise TypeError(
            f"`scripts` must be a mapping of parts to scripts, such as {{'train': ['LATIN'], 'test': ['GREEK']}}, got "
            f"{type(asked).__name__} {asked!r:.80}"
        )
    found: dict[str, list[str]] = {part: [] for part in PARTS}
    for part, names in asked.items():
        if part not in found:
            raise ValueError(
                f"`scripts` must have parts of {', '.join(PARTS)}, got {part!r}{close_to(str(part), PARTS)}"
            )
        if isinstance(names, str):
            raise TypeError(
                f"`scripts[{part!r}]` must be a list of scripts, got {names!r}: write [{names!r}]"
            )
        found[part] = [name.upper() for name in names]
    flat = [name for names in found.values() for name in names]
    if twice := sorted({name for name in flat if flat.count(name) > 1}):
        raise ValueError(f"`scripts` must have each script in one part, got {twice[0]} more than once")
    return found


def _letters(scripts: dict[str, list[str]], have: list[set[int]], least: int) -> dict[str, list[int]]:
    """Part → the code points of its scripts' letters that so many faces have."""
    letters = {}
    for code in sorted(set().union(*have)):
        enough = sum(code in face for face in have) >= least
        if enough and unicodedata.category(chr(code)) in LETTERS:
            letters[code] = unicodedata.name(chr(code), "")
    found = {}
    for part, names in scripts.items():
        starts = tuple(f"{name} " for name in names)
        for name, start in zip(names, starts, strict=True):
            if not any(letter.startswith(start) for letter in letters.values()):
                known = sorted({letter.partition(" ")[0] for letter in letters.values()})
                raise ValueError(
                    f"`scripts` must be scripts that at least {least} of the faces have, got {name!r}"
                    f"{close_to(name, known)}; names of their letters begin with {', '.join(known)}"
                )
        found[part] = [code for code, letter in letters.items() if letter.startswith(starts)]
    return found


# --- Pictures -------------------------------------------------------------------------------------------------


def _drawn(letters: dict[str, list[int]], paths: list[Path], what: dict[str, Any]) -> dict[str, Any]:
    """For each part its letters' code points, their drawings, and its classes: a letter's number, and its turn."""
    codes = sorted(code for part in letters.values() for code in part)
    known: Known = [outlines(path, sorted(charmap(path) & set(codes))) for path in paths]
    turns = range(4) if what["rotations"] else range(1)
    first = _first_alike(codes, known, turns)
    seen: set[tuple[int, int]] = set()
    kept: dict[str, Any] = {}
    for part in PARTS:
        here = [code for code in letters[part] if any(code in face for face in known)]
        # Of letters that look alike the one that most faces have is drawn.
        here.sort(key=lambda code: (-sum(code in face for face in known), code))
        new: list[tuple[int, int]] = []
        for code in here:
            for turn in turns:
                if first[code, turn] not in seen:
                    seen.add(first[code, turn])
                    new.append((code, turn))
        used = sorted({code for code, _ in new})
        number = {code: place for place, code in enumerate(used)}
        kept[f"{part}_codes"] = np.array(used, np.int64)
        kept[f"{part}_images"] = _drawings(used, known, what)
        kept[f"{part}_classes"] = np.array(sorted((number[c], t) for c, t in new), np.int64).reshape(-1, 2)
    return kept


def _drawings(codes: list[int], known: Known, what: dict[str, Any]) -> Pictures:
    """Of shape (letters, drawings, size, size); each letter is drawn from its faces in turn."""
    size, drawings = what["size"], what["drawings"]
    pictures = np.zeros((len(codes), drawings, size, size), np.uint8)
    for start in range(0, len(codes), 50):
        some = codes[start : start + 50]
        shapes: list[Outline] = []
        for code in some:
            faces = [face[code] for face in known if code in face]
            shapes += [faces[drawing % len(faces)] for drawing in range(drawings)]
        numbers = np.concatenate([random_numbers(what["seed"], code, drawings, size) for code in some])
        pictures[start : start + 50] = distorted(shapes, numbers, size).reshape(-1, drawings, size, size)
    return pictures


def _first_alike(codes: list[int], known: Known, turns: range) -> dict[tuple[int, int], tuple[int, int]]:
    """Letter and turn → the first letter and turn of those that look like it, directly or through others."""
    first = {(code, turn): (code, turn) for code in codes for turn in turns}

    def root(node: tuple[int, int]) -> tuple[int, int]:
        while first[node] != node:
            first[node] = first[first[node]]
            node = first[node]
        return node

    for face in filter(None, known):
        here = sorted(face)
        shown = clean([face[code] for code in here], SIDE) // LEVELS
        for one, other, turn in _alike(shown, turns).tolist():
            for also in turns:  # if one looks like the other turned, so do both when turned further
                a, b = (here[one], also), (here[other], (also + turn) % len(turns))
                a, b = sorted((root(a), root(b)))
                first[b] = a
    return {node: root(node) for node in first}


def _alike(pictures: Pictures, turns: range) -> Integers:
    """Pairs of pictures, and by how many quarters the second must be turned to look like the first."""
    base = pictures.reshape(len(pictures), -1).astype(np.float32)
    ink = np.square(base).sum(1)
    found = []
    for turn in turns:
        turned = np.rot90(pictures, turn, (1, 2)).reshape(len(pictures), -1).astype(np.float32)
        # Whole numbers below 2**24, so floats have them exactly.
        apart = ink[:, None] + ink - 2 * (base @ turned.T)
        one, other = np.nonzero(ALIKE * apart <= np.maximum(ink[:, None], ink))
        pairs = np.stack([one, other, np.full_like(one, turn)], 1)
        found.append(pairs[(one < other) | ((one == other) & (turn > 0))])
    return np.concatenate(found)


# --- What is kept ---------------------------------------------------------------------------------------------


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchopt_dist"


def _read(file: Path, size: int, drawings: int) -> dict[str, Any] | None:
    """What was kept, if the file is there and whole."""
    try:
        with file.open("rb") as opened, np.load(opened, allow_pickle=False) as kept:
            found = {
                f"{part}_{name}": kept[f"{part}_{name}"]
                for part in PARTS
                for name in ("codes", "images", "classes")
            }
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None
    shapes = [(len(found[f"{part}_codes"]), drawings, size, size) for part in PARTS]
    return found if [found[f"{part}_images"].shape for part in PARTS] == shapes else None


def _keep(kept: dict[str, Any], file: Path) -> None:
    """Write all, or nothing: another process may read or write the same file."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, suffix=".part", delete=False) as part:
            try:
                np.savez(part, **kept)
                part.close()
                Path(part.name).replace(file)
            except BaseException:
                Path(part.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        warnings.warn(
            f"`glyphs` could not keep its drawings in {file.parent} and draws them at every call ({error}): give a "
            "folder that can be written as `cache`",
            stacklevel=4,
        )
