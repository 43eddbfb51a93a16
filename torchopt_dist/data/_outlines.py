"""A font's file, letters → their outlines, as closed polygons of integers.

FreeType only reads the outlines, unscaled and without hinting: these numbers are in the file, so they are the same for
every version of FreeType. All that follows is arithmetic of integers.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["EM", "Integers", "Outline", "charmap", "dejavu", "outlines"]

Integers = npt.NDArray[np.int64]

EM = 1 << 20
"""The side of a face's em square, in units of an outline's coordinates."""
PIECES = 4
"""A segment, straight or curved, becomes so many edges, so that straight ones can be bent, too."""
MOVE, LINE, QUADRATIC, CUBIC, CLOSE = 1, 2, 3, 4, 79
"""The codes of matplotlib's paths."""


class Outline(NamedTuple):
    """Closed polygons, the middle of whose bounding box is the origin; y points down, as rows of a picture do."""

    corners: Integers
    """Of shape (N, 2): x and y of each corner."""
    following: Integers
    """Of shape (N,): the number of the corner to which an edge leads from this one."""


def dejavu() -> list[Path]:
    """The faces with letters that matplotlib ships: DejaVu Sans, Mono and Serif, four of each.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib import get_data_path
    except ImportError as error:
        raise ImportError(
            "`glyphs` needs matplotlib, which has the faces and reads them: pip install matplotlib"
        ) from error
    folder = Path(get_data_path(), "fonts", "ttf")
    return sorted(path for path in folder.glob("DejaVu*.ttf") if "Display" not in path.name)


def charmap(face: Path) -> set[int]:
    """The code points that a face has a picture of."""
    return set(_opened(face).get_charmap())


def outlines(face: Path, codes: Iterable[int]) -> dict[int, Outline]:
    """Code point → outline, for those whose picture is not empty.

    Raises:
        ValueError: the face has no outlines.
    """
    from matplotlib import ft2font

    modern = hasattr(ft2font, "LoadFlags")  # matplotlib 3.10
    unscaled: Any = ft2font.LoadFlags.NO_SCALE if modern else vars(ft2font)["LOAD_NO_SCALE"]
    font = _opened(face)
    paths = []
    for code in codes:
        try:
            font.load_char(code, flags=unscaled)
            points, kinds = font.get_path()
        except RuntimeError as error:
            raise ValueError(
                f"`faces` must be fonts with outlines, but {face.name} has none: leave it out"
            ) from error
        if len(kinds):
            paths.append((code, np.asarray(points), np.asarray(kinds)))
    if not paths:
        return {}
    # FreeType's numbers are 64ths of what a path has.
    units = np.rint(np.concatenate([points for _, points, _ in paths]) * 64).astype(np.int64)
    kinds = np.concatenate([kinds for _, _, kinds in paths])
    letter = np.repeat(np.arange(len(paths)), [len(kinds) for _, _, kinds in paths])
    corners, following, of = _polygons(units * (EM // PIECES**3) // font.units_per_EM, kinds, letter)
    ends = np.searchsorted(of, np.arange(len(paths) + 1))
    found = {}
    for (code, _, _), start, end in zip(paths, ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        part = corners[start:end]
        low, high = part.min(0), part.max(0)
        if (low < high).all():
            found[code] = Outline(part - (low + high) // 2, following[start:end] - start)
    return found


def _opened(face: Path) -> Any:
    from matplotlib import __version_info__
    from matplotlib.ft2font import FT2Font

    # Before matplotlib 3.11 x was divided by this factor, and rounded.
    options: dict[str, Any] = {"hinting_factor": 1} if __version_info__ < (3, 11) else {}
    try:
        return FT2Font(str(face), **options)
    except (OSError, RuntimeError) as error:
        raise ValueError(f"`faces` must be files of fonts, got {face}: {error}") from error


def _polygons(
    points: Integers, kinds: npt.NDArray[np.uint8], letter: Integers
) -> tuple[Integers, Integers, Integers]:
    """Points of paths in units of EM / PIECES³, their kinds, their letters → corners, the next of each, its letter."""
    number = np.arange(len(kinds))
    moves = kinds == MOVE
    contour = np.cumsum(moves) - 1
    points = np.where((kinds == CLOSE)[:, None], points[moves][contour], points)
    # A curve has one entry for each control point and one for its end, so several in a row are counted off.
    begins = np.flatnonzero(np.diff(kinds, prepend=0) != 0)
    in_run = number - begins[np.searchsorted(begins, number, "right") - 1]
    degree = np.select([kinds == QUADRATIC, kinds == CUBIC], [2, 3], 1)
    last = ~moves & (in_run % degree == degree - 1)
    t = np.arange(PIECES, dtype=np.int64)[:, None]
    curves = np.zeros((len(kinds), PIECES, 2), np.int64)
    for of_degree, binomial in ((1, (1, 1)), (2, (1, 2, 1)), (3, (1, 3, 3, 1))):
        ends = np.flatnonzero(last & (degree == of_degree))
        for k, factor in enumerate(binomial):
            weight = PIECES ** (3 - of_degree) * factor * t**k * (PIECES - t) ** (of_degree - k)
            curves[ends] += weight * points[ends - of_degree + k][:, None]
    corners = curves[last].reshape(-1, 2) * np.array([1, -1])
    of_contour, of_letter = (np.repeat(each[last], PIECES) for each in (contour, letter))
    begin = np.searchsorted(of_contour, of_contour)
    is_last = np.diff(of_contour, append=-1) != 0
    following = np.where(is_last, begin, np.arange(len(corners)) + 1)
    return corners, following, of_letter
