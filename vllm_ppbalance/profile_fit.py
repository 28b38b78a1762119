"""Fits a cost model to measured micro-batches: base table, interference terms, tile steps."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from statistics import median_low
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_ppbalance.base_table import BaseTable
from vllm_ppbalance.config import PredictorSettings
from vllm_ppbalance.cost_model import PUBLISHED, CostModel
from vllm_ppbalance.features import UNITS, reference_units

Floats = npt.NDArray[np.float64]

TILES = (64, 128, 256, 512)  # GEMM tiles of GPUs, and their multiples by waves
TILE_GAIN = 0.85  # a tile is found where it leaves at most this share of the error without one
SAME_ERROR = 0.0005  # mean relative errors closer than this are alike
KNOT_RATIO = 1.06  # sizes closer together share a table entry
SMOOTH = 1.0  # weight of the bend at a knot against a sample's relative error
RIDGE = 0.01  # weight of an interference term's size against a sample's relative error
NOISE = 0.01  # relative errors under this count as squares: a timing is no better
ROUNDS = 10
SAMPLES = 8.0  # what a profiled size counts for against the first samples from serving
# A constant is in the table already, so the bias stays out of the fit.
TERMS = ("mixed", "decodes", "context", "square", "prefix", "past")


class Measured(NamedTuple):
    """A measured micro-batch; see `CostModel.predict` for the first four fields."""

    num_tokens: int
    prefills: tuple[tuple[int, int], ...]
    decodes: int
    decode_context: int
    seconds: float


def fit_cost_model(
    points: Sequence[Measured],
    terms: Collection[str] = TERMS,
    settings: PredictorSettings = PUBLISHED,
) -> CostModel:
    """The cost model that predicts `points` best, in absolute relative error, with these `terms`.

    Repeats of a shape count once, by their median, so that one-time work does not. `settings` are
    for what the model learns later. Raises ValueError where no point has a positive, finite time.
    """
    shapes = _by_shape(points)
    tile = _find_tile(shapes)
    fit = _Fit(shapes, tile)
    found, rises, tile_s = fit.split(fit.solve(terms))
    table = BaseTable(fit.knots, np.cumsum(rises).tolist(), tile, tile_s, samples=SAMPLES)
    units = reference_units(table)
    theta = [1.0, *(found.get(name, 0.0) / units[name] for name in UNITS if name != "base")]
    model = CostModel(table, theta, profiled=True, settings=settings)
    model.note_prefixes([before for shape in shapes for _, before in shape.prefills])
    return model


def _by_shape(points: Sequence[Measured]) -> list[Measured]:
    times: dict[tuple[object, ...], list[float]] = defaultdict(list)
    shapes: dict[tuple[object, ...], Measured] = {}
    for point in points:
        if point.num_tokens > 0 and 0.0 < point.seconds < float("inf"):
            key = tuple(point[:4])
            times[key].append(point.seconds)
            shapes[key] = point
    if not shapes:
        raise ValueError(f"{len(points)} points, none with tokens and a finite time above 0")
    return [shape._replace(seconds=median_low(times[key])) for key, shape in shapes.items()]


def _find_tile(shapes: Sequence[Measured]) -> int:
    """The tile whose steps explain the times clearly better than a smooth table; 0 for none.

    Where a profile cannot tell tiles apart, as it has no sizes in between, the largest.
    """
    smooth = _Fit(shapes, 0).error()
    errors = {tile: _Fit(shapes, tile).error() for tile in TILES}
    least = min(errors.values())
    if least > TILE_GAIN * smooth:
        return 0
    return max(tile for tile, error in errors.items() if error <= least + SAME_ERROR)


class _Fit:
    """The least-squares problem: a column for each term, rise between knots, and the tile's step.

    All solutions are at least 0, so that the table rises and nothing a batch carries makes it
    faster.
    """

    def __init__(self, shapes: Sequence[Measured], tile: int) -> None:
        sizes = [shape.num_tokens for shape in shapes]
        times = np.array([shape.seconds for shape in shapes])
        self.knots = _knots(sizes)
        # A rise at a knot counts for that knot and all later ones.
        rises = np.cumsum(_hats(sizes, self.knots)[:, ::-1], axis=1)[:, ::-1]
        columns = [_terms(shapes), rises]
        if tile:
            columns.append(np.array([[float(-(-n // tile))] for n in sizes]))
        self._design = np.hstack(columns) / times[:, None]
        self._penalty = self._penalties(np.interp(self.knots, *_sorted_pairs(sizes, times)))

    def solve(self, terms: Collection[str] = TERMS) -> Floats:
        """Seconds of each column, by reweighted least squares without the negative ones."""
        free = np.ones(self._design.shape[1], dtype=bool)
        free[: len(TERMS)] = [name in terms for name in TERMS]
        while True:
            solved = self._solve(free)
            negative = solved < 0.0
            if not negative.any():
                return solved
            free &= ~negative

    def split(self, solved: Floats) -> tuple[dict[str, float], Floats, float]:
        """A solution as terms, rises and the tile's step."""
        first, last = len(TERMS), len(TERMS) + len(self.knots)
        terms = dict(zip(TERMS, solved[:first].tolist(), strict=True))
        return terms, solved[first:last], float(solved[last:].sum())

    def error(self) -> float:
        """Mean absolute relative error of the solution, the table's bends counted as errors."""
        solved = self.solve()
        bends = np.abs(self._penalty[len(TERMS) :] @ solved)
        errors = np.abs(self._design @ solved - 1.0)
        return float(errors.sum() + bends.sum()) / len(errors)

    def _solve(self, free: npt.NDArray[np.bool_]) -> Floats:
        scale = np.abs(self._design).max(axis=0)
        scale[scale == 0.0] = 1.0
        design = (self._design / scale)[:, free]
        penalty = self._penalty / scale
        penalty[: len(TERMS)] = np.eye(len(TERMS), len(scale)) * RIDGE
        penalty = penalty[:, free]
        weights = np.ones(len(design))
        for _ in range(ROUNDS):
            right = np.concatenate([weights, np.zeros(len(penalty))])
            rows = np.vstack([design * weights[:, None], penalty])
            found = np.linalg.lstsq(rows, right, rcond=None)[0]
            weights = 1.0 / np.sqrt(np.maximum(np.abs(design @ found - 1.0), NOISE))
            weights /= weights.mean()
        solved = np.zeros(len(scale))
        solved[free] = found
        return np.asarray(solved / scale, dtype=np.float64)

    def _penalties(self, times: Floats) -> Floats:
        """A row for each term, filled in later, and for each bend of the table over `times`."""
        first, knots = len(TERMS), self.knots
        rows = np.zeros((first + max(len(knots) - 2, 0), self._design.shape[1]))
        for i in range(1, len(knots) - 1):
            before, after = knots[i] - knots[i - 1], knots[i + 1] - knots[i]
            scale = SMOOTH / times[i] / (before + after)
            # The time at a knot against the straight line between its neighbours.
            rows[first + i - 1, first + i] = after * scale
            rows[first + i - 1, first + i + 1] = -before * scale
        return rows


def _sorted_pairs(sizes: Sequence[int], times: Floats) -> tuple[Floats, Floats]:
    order = np.argsort(sizes)
    return np.array(sizes, dtype=np.float64)[order], times[order]


def _knots(sizes: Sequence[int]) -> list[int]:
    knots: list[int] = []
    for size in sorted(set(sizes)):
        if not knots or size >= knots[-1] * KNOT_RATIO:
            knots.append(size)
    return knots


def _terms(shapes: Sequence[Measured]) -> Floats:
    """Raw features in the order of TERMS; shape (points, terms)."""
    rows = [
        (
            float(bool(shape.prefills)),
            shape.decodes,
            shape.decode_context,
            sum(new * new for new, _ in shape.prefills),
            sum(new * before for new, before in shape.prefills),
            sum(before for _, before in shape.prefills),
        )
        for shape in shapes
    ]
    return np.array(rows, dtype=np.float64)


def _hats(sizes: Sequence[int], knots: Sequence[int]) -> Floats:
    """Weights of the knots at each size, as `BaseTable` interpolates; shape (sizes, knots)."""
    weights = np.zeros((len(sizes), len(knots)))
    for row, size in zip(weights, sizes, strict=True):
        index = int(np.searchsorted(knots, size, side="right"))
        if index == 0:
            row[0] = 1.0
        elif index == len(knots):
            row[-1] = size / knots[-1]
        else:
            part = (size - knots[index - 1]) / (knots[index] - knots[index - 1])
            row[index - 1], row[index] = 1.0 - part, part
    return weights
