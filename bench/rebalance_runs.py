"""The runs of the rebalancing report: one case under one strategy, kept once it is done."""

import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.evened import removable
from bench.rebalance_cases import Case, spec_of
from bench.sim_world import build_workload
from bench.simulate import Outcome, simulate

Run = dict[str, Any]

IDLE_S = 60.0
STEADY_FROM = 0.5  # of the time requests come in
GOODPUT_LOADS, GOODPUT_STEP = (0.4, 1.0), 0.04
GOODPUT_TTFT_S = 2.0


def measure_case(case: Case, strategy: str, folder: Path, seed: int) -> Run:
    """One run; shares of the time with work, seconds, tokens a second."""
    spec = spec_of(case, strategy, folder, seed)
    requests = [replace(r, arrival_s=r.arrival_s + IDLE_S) for r in build_workload(spec)]
    outcome = simulate(spec, requests=requests)
    measures, pipeline = outcome.result["measures"], outcome.result["pipeline"]
    if measures["num_unfinished"]:
        raise RuntimeError(f"{case}: {measures['num_unfinished']} requests were not served")
    return {
        "rate": spec.workload.rate,
        "dd": pipeline["bubble_ratio_by_cause"]["decode_decode"],
        "removable": removable(spec, outcome.run.steps, requests[0].arrival_s),
        "bubbles": pipeline["bubble_ratio"],
        "tok_per_s": measures["output_tok_per_s"],
        "steady_tok_per_s": steady_tok_per_s(outcome, case.window_s),
        "tpot_s": measures["tpot_s"],
        "ttft_p90_s": measures["ttft_s"]["p90"],
        "moves": outcome.result["num_moves"],
        "own_share": outcome.real["own_share_of_schedule"],
        "wall_s": outcome.real["wall_s"],
    }


def steady_tok_per_s(outcome: Outcome, window_s: float) -> float:
    """Output tokens a second while requests still come in and the first of them are through."""
    start_s, end_s = IDLE_S + STEADY_FROM * window_s, IDLE_S + window_s
    times = (t for served in outcome.run.requests.values() for t in served.token_times_s)
    return sum(start_s <= t < end_s for t in times) / (end_s - start_s)


def cached_run(case: Case, strategy: str, cache: Path, seed: int) -> Run:
    """`measure_case`, or what it found before, from the folder `cache`."""
    name = "-".join(str(value) for value in asdict(case).values()).replace(" ", "")
    path = cache / f"{name}-{strategy}-{seed}.json"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            found = measure_case(case, strategy, Path(folder), seed)
        path.write_text(json.dumps(found), encoding="utf-8")
        print(case.title, case.pp_size, case.workload, strategy, seed, found, flush=True)
    return dict(json.loads(path.read_text(encoding="utf-8")))


def goodput(case: Case, strategy: str, slo_tpot_s: float, cache: Path, seed: int) -> float:
    """The highest rate, requests a second, at which P90 TTFT and P90 TPOT meet their targets.

    Bisection over the load; between its last two runs P90 TPOT is taken to grow in a straight line.
    Raises ValueError where the lowest load misses the targets or the highest meets them.
    """

    def at(load: float) -> Run:
        return cached_run(replace(case, load=round(load, 4)), strategy, cache, seed)

    def meets(run: Run) -> bool:
        return bool(run["tpot_s"]["p90"] <= slo_tpot_s and run["ttft_p90_s"] <= GOODPUT_TTFT_S)

    low, high = GOODPUT_LOADS
    if not meets(at(low)) or meets(at(high)):
        raise ValueError(f"goodput of {strategy} at {slo_tpot_s} s: not at loads {low} to {high}")
    while high - low > GOODPUT_STEP:
        middle = (low + high) / 2
        low, high = (middle, high) if meets(at(middle)) else (low, middle)
    below, above = at(low), at(high)
    part = 0.0  # of the way from the lower to the higher rate
    if above["ttft_p90_s"] <= GOODPUT_TTFT_S:
        grown_s = above["tpot_s"]["p90"] - below["tpot_s"]["p90"]
        part = (slo_tpot_s - below["tpot_s"]["p90"]) / grown_s
    return float(below["rate"] + part * (above["rate"] - below["rate"]))
