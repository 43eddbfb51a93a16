"""Outlines, and random numbers for each picture → pictures, by arithmetic of integers: the same on every machine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from torchopt_dist.data._outlines import EM, Integers, Outline

__all__ = ["Pictures", "clean", "distorted", "random_numbers"]

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
