"""How much of a measured step is host work: one stage alone against the same stage in a pipeline.

A full pipeline hides the host, so the time between two completions is GPU time. Where a step timed
from the host takes longer, the rest is the host's.
"""

import gzip
import json
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

import numpy as np

ALIKE_STEPS = 4  # consecutive decode-only steps of nearly one size: a steady, full pipeline
BUCKET_DECODES = 8
MIN_GAPS = 10


def decode_gaps(log: str | Path) -> Iterator[tuple[float, float]]:
    """(mean decodes, seconds between two completions) wherever only decodes are in flight."""
    in_flight: deque[tuple[int, int]] = deque()
    done: list[tuple[float, int, int]] = []
    with gzip.open(log, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            if row["tok"] == 0:
                continue
            if "done" in row:
                done.append((float(row["done"]), *in_flight.popleft()))
            else:
                in_flight.append((int(row["tok"]), int(row["dec"])))
    for end in range(ALIKE_STEPS, len(done)):
        window = done[end - ALIKE_STEPS + 1 : end + 1]
        decodes = [row[2] for row in window]
        alike = max(decodes) - min(decodes) <= max(4.0, 0.1 * max(decodes))
        if alike and min(decodes) > 0 and all(tokens == count for _, tokens, count in window):
            yield sum(decodes) / len(decodes), done[end][0] - done[end - 1][0]


def mean_decode_context(lengths: Sequence[tuple[int, int]]) -> float:
    """Context of a decode picked at random: a request is alive for as many steps as it outputs."""
    weighted = sum((prompt + output / 2.0) * output for prompt, output in lengths)
    return weighted / sum(output for _, output in lengths)


def host_seconds(
    gaps: Mapping[float, Sequence[tuple[float, float]]],
    stage_s: Callable[[float, float], float],
) -> tuple[float, float]:
    """Host seconds (a step, a decode) hidden by the pipeline, by least squares over medians.

    `gaps` maps the mean context a decode reads to (decodes, gap) pairs; `stage_s(decodes, context)`
    is the pipeline's slowest stage as the rows alone give it, host included once per row stage.
    Returns what the gaps are short of it.
    """
    points: list[tuple[float, float]] = []
    for context, pairs in gaps.items():
        buckets: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for decodes, gap in pairs:
            buckets[int(decodes) // BUCKET_DECODES].append((decodes, gap))
        for bucket in buckets.values():
            if len(bucket) >= MIN_GAPS:
                decodes = sum(n for n, _ in bucket) / len(bucket)
                hidden = stage_s(decodes, context * decodes) - median(gap for _, gap in bucket)
                points.append((decodes, hidden))
    if len(points) < 2:
        raise ValueError(f"{len(points)} decode counts have {MIN_GAPS} gaps or more: needs 2")
    design = np.array([[1.0, decodes] for decodes, _ in points])
    step, decode = np.linalg.lstsq(design, np.array([s for _, s in points]), rcond=None)[0]
    return float(step), float(decode)
