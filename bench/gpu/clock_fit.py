"""How far the GPU's clock explains stage times: `... clock_fit ALONE LOAD [LOAD ...]`.

ALONE and LOAD are `stages-N.json` of `pp_serving`, as in `stage_report`. The model has three
numbers, fitted to all LOADs: a GPU at its power limit takes `heavy` longer for a micro-batch of
HEAVY tokens and more with a prompt among them, `light` longer for one of LIGHT and fewer; and it
comes to that limit, and back in other micro-batches and in pauses, with a time constant. Cold, a
micro-batch takes what the profile says times what ALONE shows of the profile.

The logs know tokens and requests of a micro-batch, not its contexts: each decode reads CONTEXT
tokens here. Only the first stage is read; the last one's forward pass lacks the LM head.
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise, product
from math import exp
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import numpy as np

from bench.batch import BatchShape
from bench.gpu.stage_report import stages_of
from bench.pipeline import StageTime
from bench.pipeline_overhead import CALIBRATED
from bench.sim_spec import profile_of

PROFILE, LAYERS = "h200_qwen2.5-32b", 32
CONTEXT = 1100  # tokens a decode reads: about the mean of the Azure conversation lengths
LIGHT, HEAVY = 100, 350  # tokens
STARTING = 5  # micro-batches left out at the beginning
ONE_TIME = 3.0  # times the profile's time from which a row holds one-time work
BINS = (1, 64, 130, 200, 300, 400, 505, 520, 700, 760, 1000, 2000)  # tokens
TAUS_S = (0.03, 0.045, 0.06, 0.08, 0.12, 0.2)
HEAVIES = (0.14, 0.17, 0.2, 0.23, 0.26, 0.3)
LIGHTS = (0.0, 0.05, 0.1, 0.2)


class Row(NamedTuple):
    """A micro-batch on the first stage."""

    shape: BatchShape
    start_s: float
    forward_s: float  # measured
    profile_s: float


class Clock(NamedTuple):
    """The model; shares of a cold micro-batch's time, and seconds."""

    tau_s: float
    heavy: float
    light: float

    def times(self, rows: Sequence[Row], cold: Sequence[float]) -> list[float]:
        """Seconds for each row in turn; heat follows from the measured times before it."""
        heat, now_s, found = 0.0, rows[0].start_s if rows else 0.0, []
        for row, cold_s in zip(rows, cold, strict=True):
            heat *= exp(-max(row.start_s - now_s, 0.0) / self.tau_s)
            tokens = row.shape.num_tokens
            share = min(max((tokens - LIGHT) / (HEAVY - LIGHT), 0.0), 1.0)
            goal = share if row.shape.prefills else 0.0
            loss = self.light + share * (self.heavy - self.light)
            alone = 1.0 + loss * self._mean(0.0, goal, cold_s)
            seconds = cold_s
            for _ in range(3):  # it heats for as long as it takes
                seconds = cold_s * (1.0 + loss * self._mean(heat, goal, seconds)) / alone
            found.append(seconds)
            heat = goal + (heat - goal) * exp(-row.forward_s / self.tau_s)
            now_s = row.start_s + row.forward_s
        return found

    def _mean(self, heat: float, goal: float, seconds: float) -> float:
        """Of the heat over a micro-batch that begins at `heat`."""
        return goal + (heat - goal) * (1.0 - exp(-seconds / self.tau_s)) * self.tau_s / seconds


def read_rows(path: Path, stage: StageTime) -> list[Row]:
    """Without the first ones, and without those that hold one-time work."""
    found = []
    for tokens, requests, start_s, forward_s, _ in stages_of(path)[0][STARTING:]:
        decodes = int(requests) if tokens <= requests else int(requests) - 1
        new = int(tokens) - decodes
        shape = BatchShape(((new, 0),) if new else (), decodes, decodes, decodes * CONTEXT)
        row = Row(shape, start_s, forward_s, stage(shape))
        if forward_s < ONE_TIME * row.profile_s:
            found.append(row)
    return found


def cold_factors(path: Path, stage: StageTime) -> tuple[list[float], list[float]]:
    """Tokens, and median measured time over the profile's for a prompt of so many alone."""
    alone: dict[int, list[float]] = defaultdict(list)
    for tokens, _, _, forward_s, _ in stages_of(path)[0]:
        alone[int(tokens)].append(forward_s / stage(BatchShape(((int(tokens), 0),))))
    sizes = sorted(alone)
    return [float(n) for n in sizes], [median(alone[n]) for n in sizes]


def error(rows: Sequence[Row], times: Sequence[float]) -> tuple[float, float]:
    """Mean absolute error, and that of the sum, as shares of what was measured."""
    each = [abs(t / row.forward_s - 1.0) for row, t in zip(rows, times, strict=True)]
    return fmean(each), sum(times) / sum(row.forward_s for row in rows) - 1.0


def best_clock(loads: Sequence[Sequence[Row]], colds: Sequence[Sequence[float]]) -> Clock:
    """Of the grid, the one with the least mean absolute error, every load counted alike."""

    def loss(clock: Clock) -> float:
        pairs = zip(loads, colds, strict=True)
        return sum(error(rows, clock.times(rows, cold))[0] for rows, cold in pairs)

    return min(map(Clock._make, product(TAUS_S, HEAVIES, LIGHTS)), key=loss)


def main() -> int:
    """Print what was found, and two Markdown tables a load."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("alone", type=Path)
    parser.add_argument("loads", type=Path, nargs="+")
    files = parser.parse_args()
    compiled, overhead = profile_of(PROFILE).compiled, CALIBRATED[PROFILE]

    def stage(shape: BatchShape) -> float:
        return compiled(shape, LAYERS, True, False)

    sizes, factors = cold_factors(files.alone, stage)
    pairs = zip(sizes, factors, strict=True)
    print("cold over profile:", ", ".join(f"{n:.0f}: {f:.3f}" for n, f in pairs))
    loads = [read_rows(path, stage) for path in files.loads]
    colds = [
        [r.profile_s * float(np.interp(r.shape.num_tokens, sizes, factors)) for r in rows]
        for rows in loads
    ]
    clock = best_clock(loads, colds)
    print(f"best: {clock}")
    for name, rows, cold in zip(files.loads, loads, colds, strict=True):
        now = overhead.wrap(stage, LAYERS)
        models = {
            "profile": [row.profile_s for row in rows],
            "with today's overhead": [now(row.shape) for row in rows],
            "clock": clock.times(rows, cold),
        }
        print(f"\n{name}\n\n| model | mean abs. error | of the sum |\n|---|---|---|")
        for label, times in models.items():
            each, whole = error(rows, times)
            print(f"| {label} | {each:.1%} | {whole:+.1%} |")
        print("\n| tokens | number | measured, ms | " + " | ".join(models) + " |")
        print("|---|---|---|" + "---|" * len(models))
        for low, high in pairwise(BINS):
            at = [i for i, row in enumerate(rows) if low <= row.shape.num_tokens < high]
            if at:
                columns = ([row.forward_s for row in rows], *models.values())
                cells = [f"{1e3 * median(times[i] for i in at):.2f}" for times in columns]
                print(f"| {low} to {high - 1} | {len(at)} | " + " | ".join(cells) + " |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
