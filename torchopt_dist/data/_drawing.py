"""A font's file, letters, random numbers → pictures, by arithmetic of integers: the same on every machine.

FreeType only reads the outlines, unscaled and without hinting: these numbers are in the file, so they are the same for
every version of FreeType.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = [
    "EM",
    "Integers",
    "Outline",
    "Pictures",
    "charmap",
    "clean",
    "dejavu",
    "distorted",
    "outlines",
    "random_numbers",
]


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


Pictures = npt.NDArray[np.uint8]
"""Of shape (N, size, size), ink 255 on paper 0."""

PIXEL = 256
"""The side of a pixel, in units of a point's coordinates."""
LINES = 4
"""A row of pixels is the mean of so many lines."""
EM_OF_SIDE, MOST_OF_SIDE = (5, 7), (6, 7)
"""An em square's part of a picture's side; and the largest part for a letter, which is made smaller if it has more."""
CELLS = 4
"""Corners are moved by a grid of so many cells a side, whose nodes are moved at random, linearly in between."""
NODES = (CELLS + 1) ** 2 * 2
AFFINE = 7
CHUNK = 1024
"""So many pictures are drawn at a time."""

TURN, SIZE, SHEAR, SHIFT, BEND, NOISE = 16384, 9830, 13107, 6554, 3932, 66
"""The largest part of a distortion: 65536ths of a radian, of the size, of the height, of the side twice; of 255."""


def clean(outlines: Sequence[Outline], size: int) -> Pictures:
    """The outlines as they are, in the middle of a picture each."""
    parts = [outlines[start : start + CHUNK] for start in range(0, len(outlines), CHUNK)]
    drawn = [_filled(_placed(part, size), part, size) for part in parts]
    return np.concatenate(drawn) if drawn else np.zeros((0, size, size), np.uint8)


def random_numbers(seed: int, code: int, drawings: int, size: int) -> Integers:
    """For each drawing of a letter the numbers of its distortion, from 0 to 65535; the stream is fixed by numpy."""
    each = AFFINE + NODES + size * size
    stream = np.random.Philox(key=[seed % 2**64, code]).random_raw(-(-drawings * each // 4))
    numbers = np.asarray(stream, dtype="<u8").view("<u2")[: drawings * each]
    return numbers.astype(np.int64).reshape(drawings, each)


def distorted(outlines: Sequence[Outline], numbers: Integers, size: int) -> Pictures:
    """Each outline turned, sheared, moved, made larger or smaller, and bent; and noise on each pixel.

    Args:
        outlines: one a picture.
        numbers: of shape (N, …), those of :func:`random_numbers` for each.
        size: the side of a picture.
    """
    drawn = []
    for start in range(0, len(outlines), CHUNK):
        part, drew = outlines[start : start + CHUNK], numbers[start : start + CHUNK]
        image = np.repeat(np.arange(len(part)), [len(outline.corners) for outline in part])
        corners = _affine(_placed(part, size), drew[:, :AFFINE], image, size)
        corners = _bent(corners, drew[:, AFFINE : AFFINE + NODES], image, size)
        noise = drew[:, AFFINE + NODES :].reshape(-1, size, size)
        # The sum of two bytes has a triangular distribution.
        noise = ((noise >> 8) + (noise & 255) - 255) * NOISE // 256
        drawn.append(np.clip(_filled(corners, part, size) + noise, 0, 255).astype(np.uint8))
    return np.concatenate(drawn) if drawn else np.zeros((0, size, size), np.uint8)


def _placed(outlines: Sequence[Outline], size: int) -> Integers:
    """The corners of all outlines, in units of pixels, about the origin."""
    side = size * PIXEL
    placed = []
    for outline in outlines:
        extent = int((outline.corners.max(0) - outline.corners.min(0)).max())
        most = EM * MOST_OF_SIDE[0] * EM_OF_SIDE[1] // (MOST_OF_SIDE[1] * EM_OF_SIDE[0])
        placed.append(outline.corners * most // max(extent, most))
    return np.concatenate(placed) * (side * EM_OF_SIDE[0]) // (EM * EM_OF_SIDE[1])


def _between(numbers: Integers, largest: int) -> Integers:
    """Numbers from 0 to 65535 → from -largest to largest."""
    return (numbers * (2 * largest + 1) >> 16) - largest


def _affine(corners: Integers, numbers: Integers, image: Integers, size: int) -> Integers:
    turn, larger, wider, shear = (
        _between(numbers[:, place], most)[image] for place, most in enumerate((TURN, SIZE, SIZE // 2, SHEAR))
    )
    shift = _between(numbers[:, 4:6], SHIFT)[image] * size >> 8  # of half a side, in pixels' units
    x, y = corners[:, 0], corners[:, 1]
    one = 1 << 16
    turned_x = (one + larger + wider) * x + (shear - turn) * y >> 16
    turned_y = turn * x + (one + larger - wider) * y >> 16
    return np.stack([turned_x, turned_y], 1) + (shift >> 1)


def _bent(corners: Integers, numbers: Integers, image: Integers, size: int) -> Integers:
    nodes = (_between(numbers, BEND) * size >> 8).reshape(-1, CELLS + 1, CELLS + 1, 2)
    place = np.clip(corners * CELLS // size + CELLS * PIXEL // 2, 0, CELLS * PIXEL - 1)
    cell, part = place >> 8, place & 255
    (i, j), (u, v) = cell.T, part.T[:, :, None]
    above = nodes[image, j, i] * (256 - u) + nodes[image, j, i + 1] * u
    below = nodes[image, j + 1, i] * (256 - u) + nodes[image, j + 1, i + 1] * u
    return corners + (above * (256 - v) + below * v >> 16)


def _filled(corners: Integers, outlines: Sequence[Outline], size: int) -> Pictures:
    """Polygons, filled where they go round a point: on each line exactly, and so many lines a row."""
    counts = np.array([len(outline.corners) for outline in outlines])
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    image = np.repeat(np.arange(len(outlines)), counts)
    corners = corners + size * PIXEL // 2
    ends = corners[np.concatenate([outline.following for outline in outlines]) + starts]
    (x, y), (to_x, to_y) = corners.T, ends.T
    apart, lines = PIXEL // LINES, size * LINES
    # The lines at (k + 1/2) · apart with low <= line < high.
    low, high = np.minimum(y, to_y), np.maximum(y, to_y)
    first = np.clip(-((apart // 2 - low) // apart), 0, lines)
    beyond = np.clip(-((apart // 2 - high) // apart), 0, lines)
    crossed = beyond - first
    edge = np.repeat(np.arange(len(crossed)), crossed)
    line = np.arange(len(edge)) - np.repeat(np.cumsum(crossed) - crossed, crossed) + first[edge]
    height = line * apart + apart // 2
    at = x[edge] + (height - y[edge]) * (to_x - x)[edge] // (to_y - y)[edge]
    at = np.clip(at, 0, size * PIXEL)
    sign = np.sign(to_y - y)[edge]
    width = size + 2
    cell = (image[edge] * lines + line) * width + (at >> 8)
    right = at & 255
    total = len(outlines) * lines * width
    # What a crossing adds to all pixels at its right, as differences between neighbours; sums of floats that are whole.
    change = np.bincount(cell, sign * (256 - right), total) + np.bincount(cell + 1, sign * right, total)
    ink = np.minimum(np.abs(np.cumsum(change.reshape(-1, lines, width), -1)), 256)[..., :size]
    rows = ink.reshape(-1, size, LINES, size).sum(2) // LINES
    return np.minimum(rows, 255).astype(np.uint8)
