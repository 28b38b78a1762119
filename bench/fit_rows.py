"""Fit of a latency profile to measured steps of one pipeline stage (`h200_stage/*.jsonl`)."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.batch import BatchShape
from bench.fit_common import Floats, least_absolute, percent_errors

# vLLM 0.23's default capture sizes for max_num_seqs 512 (VllmConfig._set_cudagraph_sizes).
CUDAGRAPH_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
SHORT_TOKENS = 256
SMALL_BATCHES = (1, 16, 32)  # table rows under the smallest measured prefill; decodes fill them
SAME_CONTEXT_TOKENS = 8  # decode steps of one pass differ by a token a step


@dataclass(frozen=True, slots=True)
class MeasuredShape:
    """One shape and all its step times, seconds, host work included."""

    shape: BatchShape
    seconds: tuple[float, ...]

    @property
    def best_s(self) -> float:
        """The minimum: one-time work and noise only ever add."""
        return min(self.seconds)


@dataclass(slots=True)
class RowFit:
    """Coefficients for a whole measured stage, seconds; `host_*` is not GPU time."""

    knots: tuple[int, ...]
    linear_s: list[float]
    prefill_pair_s: float
    prefill_short_s: float
    decode_context_s: float
    decode_s: float  # host and GPU together: the rows alone cannot tell them apart
    new_request_s: float


def load_rows(path: str | Path) -> tuple[dict[str, Any], list[MeasuredShape]]:
    """The `meta` line and the measured shapes. Raises ValueError naming file and line."""
    meta: dict[str, Any] = {}
    groups: dict[tuple[Any, ...], list[tuple[BatchShape, float]]] = {}
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            if "meta" in row:
                meta = row["meta"]
                continue
            shape = _shape(row)
            seconds = float(row["t_ms"]) / 1e3
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number}: not a measured step: {error!r}") from error
        groups.setdefault(_key(shape, groups), []).append((shape, seconds))
    if not meta or not groups:
        raise ValueError(f"{path}: needs a meta line and at least one measured step")
    return meta, [
        MeasuredShape(rows[0][0], tuple(seconds for _, seconds in rows)) for rows in groups.values()
    ]


def _shape(row: dict[str, Any]) -> BatchShape:
    decodes = int(row["decodes"])
    return BatchShape(
        prefills=tuple((int(new), int(prefix)) for new, prefix in row["prefill"]),
        decodes=decodes,
        decode_tokens=decodes,
        decode_context=int(row["decode_context"]),
    )


def _key(shape: BatchShape, known: dict[tuple[Any, ...], Any]) -> tuple[Any, ...]:
    context = shape.decode_context / shape.decodes if shape.decodes else 0.0
    for key in known:
        same = key[:2] == (shape.prefills, shape.decodes)
        if same and abs(key[2] - context) <= SAME_CONTEXT_TOKENS:
            return key
    return (shape.prefills, shape.decodes, context)


def table_tokens(shapes: Sequence[MeasuredShape]) -> tuple[int, ...]:
    """Token counts that get a table row: those a pure prefill measured, and the small batches."""
    measured = {s.shape.num_tokens for s in shapes if not s.shape.decodes}
    if not measured:
        raise ValueError("no step without decodes: the linear table cannot be told from the host")
    return (*(n for n in SMALL_BATCHES if n < min(measured)), *sorted(measured))


def _pad(tokens: int, sizes: Sequence[int]) -> int:
    return next((size for size in sizes if size >= tokens), tokens)


def _features(shape: BatchShape, knots: Sequence[int], sizes: Sequence[int]) -> list[float]:
    tokens = _pad(shape.num_tokens, sizes)
    weights = [0.0] * len(knots)
    if tokens >= knots[-1]:
        weights[-1] = tokens / knots[-1]
    else:
        right = next(i for i, knot in enumerate(knots) if knot > tokens)
        left = max(right - 1, 0)
        part = (tokens - knots[left]) / max(knots[right] - knots[left], 1)
        weights[left] += 1.0 - part
        weights[right] += part
    pairs = sum(new * (2 * prefix + new) for new, prefix in shape.prefills)
    short = sum(prefix * min(new, SHORT_TOKENS) for new, prefix in shape.prefills)
    new_requests = sum(prefix == 0 for _, prefix in shape.prefills)
    return [*weights, pairs, short, new_requests, shape.decodes, shape.decode_context]


def fit_shapes(
    shapes: Sequence[MeasuredShape],
    knots: tuple[int, ...],
    decode_context_s: float | None = None,
    sizes: Sequence[int] = CUDAGRAPH_SIZES,
) -> RowFit:
    """Least absolute relative error by reweighted least squares; the table is made monotone.

    `decode_context_s`, seconds a context token for the whole stage, is fitted where None. Host time
    per step stays inside the table: no shape has none, so the rows cannot show it.
    """
    design = np.array([_features(s.shape, knots, sizes) for s in shapes], dtype=np.float64)
    times = np.array([s.best_s for s in shapes], dtype=np.float64)
    target = times.copy()
    if decode_context_s is not None:
        target -= decode_context_s * design[:, -1]
        design = design[:, :-1]
    solved = least_absolute(design / times[:, None], target / times)
    found = [*solved.tolist(), *([] if decode_context_s is None else [decode_context_s])]
    pair, short, new_request, decode, context = (max(value, 0.0) for value in found[len(knots) :])
    return RowFit(
        knots=knots,
        linear_s=np.maximum.accumulate(found[: len(knots)]).tolist(),
        prefill_pair_s=pair,
        prefill_short_s=short,
        decode_context_s=context,
        decode_s=decode,
        new_request_s=new_request,
    )


def predict_rows(
    fit: RowFit, shapes: Sequence[MeasuredShape], sizes: Sequence[int] = CUDAGRAPH_SIZES
) -> Floats:
    """Seconds of each shape as the rows would show it, host work included."""
    terms = [
        *fit.linear_s,
        fit.prefill_pair_s,
        fit.prefill_short_s,
        fit.new_request_s,
        fit.decode_s,
        fit.decode_context_s,
    ]
    design = np.array([_features(s.shape, fit.knots, sizes) for s in shapes], dtype=np.float64)
    return np.asarray(design @ np.array(terms), dtype=np.float64)


def heldout_errors(
    shapes: Sequence[MeasuredShape],
    knots: tuple[int, ...],
    decode_context_s: float | None = None,
    folds: int = 5,
) -> Floats:
    """Percentage errors of every shape, each predicted by a fit that did not see it."""
    errors: list[float] = []
    for fold in range(folds):
        train = [s for i, s in enumerate(shapes) if i % folds != fold]
        test = [s for i, s in enumerate(shapes) if i % folds == fold]
        predicted = predict_rows(fit_shapes(train, knots, decode_context_s), test)
        errors += percent_errors(predicted, np.array([s.best_s for s in test])).tolist()
    return np.array(errors)
