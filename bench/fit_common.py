"""What the fits share: a robust solver, error statistics, rounding, the LM head by proportion."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

MAX_HEAD_ROWS = 1024  # beyond, the head's time grows in proportion


def least_absolute(design: Floats, target: Floats, rounds: int = 40) -> Floats:
    """Coefficients of least absolute error, by reweighted least squares."""
    scale = np.abs(design).max(axis=0)
    scale[scale == 0.0] = 1.0
    weights = np.ones(len(target))
    solved = np.zeros(design.shape[1])
    for _ in range(rounds):
        solved = np.linalg.lstsq(design / scale * weights[:, None], target * weights, rcond=None)[0]
        residual = np.abs(design / scale @ solved - target)
        weights = 1.0 / np.sqrt(np.maximum(residual, 0.005))
    return np.asarray(solved / scale, dtype=np.float64)


def percent_errors(predicted: Floats, measured: Floats) -> Floats:
    """Absolute percentage errors."""
    return np.asarray(np.abs(predicted / measured - 1.0) * 100.0, dtype=np.float64)


def error_fields(rows: int, errors: Floats, heldout: Floats) -> dict[str, Any]:
    """The fields of `bench.latency.FitError`."""
    fields: dict[str, Any] = {"rows": rows, "shapes": len(errors)}
    for name, values in (("", errors), ("heldout_", heldout)):
        fields[f"{name}median_percent"] = round(float(np.median(values)), 2)
        fields[f"{name}mean_percent"] = round(float(np.mean(values)), 2)
        fields[f"{name}p90_percent"] = round(float(np.percentile(values, 90)), 2)
    return fields


def round_seconds(seconds: float) -> float:
    """Four significant digits: more than any measurement here is good for."""
    return float(f"{seconds:.4g}")


def table_rows(table: Sequence[tuple[int, float]]) -> list[list[float]]:
    """A table as YAML holds it."""
    return [[tokens, round_seconds(seconds)] for tokens, seconds in table]


def head_table(
    linear: Sequence[tuple[int, float]], layer_parameters: int, head_parameters: int
) -> list[list[float]]:
    """LM head by rows: a GEMM at the time per parameter the layer's GEMMs take at that size."""
    scale = head_parameters / layer_parameters
    return table_rows([(rows, s * scale) for rows, s in linear if rows <= MAX_HEAD_ROWS])
