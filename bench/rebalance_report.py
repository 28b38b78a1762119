"""What rebalancing is worth: `python -m bench.rebalance_report OUT.md`, a Markdown table.

Every strategy serves the same requests under the same fixed token budget. The engine is idle for a
minute before the first of them, in which `auto` and `tiered` measure the stages as they would in
service.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.__main__ import _quiet
from bench.bubbles import Load, stage_use
from bench.rebalance_cases import CASES, Case, spec_of
from bench.sim_world import build_workload
from bench.simulate import Outcome, simulate
from bench.versions import versions

STRATEGIES = ("off", "even_share", "tiered", "auto")
IDLE_S = 60.0
GOODPUT_LOADS, GOODPUT_STEP = (0.4, 1.0), 0.02
GOODPUT_TTFT_S, GOODPUT_TPOT_S = 2.0, 0.08  # about the time of a full tile in each micro-batch
_HEAD = (
    "| pipeline | workload, requests/s | strategy | D-D bubble % | of the slowest stage % "
    "| all bubbles % | output tok/s | TPOT P50 ms | P90 | P99 | TTFT P90 ms | held | ours % |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)

_TEXT = """Written by `python -m bench.rebalance_report`, seed {seed}. {about}
Simulated on latency profiles measured on these GPUs; `flat decodes` is a made-up profile of the
H200 one. Poisson arrivals (bursts: gamma, coefficient of variation 6), outputs of at most 300
tokens; the percentage beside the rate is of the work the stages can do. In brackets: against `off`.
The D-D bubbles of all stages hold what a longer last stage makes the others wait. `ours` is the
plugin's time on top of what vLLM's own scheduler takes.

Versions: {made}.

"""


def measure_case(case: Case, strategy: str, folder: Path, seed: int) -> dict[str, Any]:
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
        "slowest_dd": slowest_stage_dd(outcome),
        "bubbles": pipeline["bubble_ratio"],
        "tok_per_s": measures["output_tok_per_s"],
        "tpot_s": measures["tpot_s"],
        "ttft_p90_s": measures["ttft_s"]["p90"],
        "moves": outcome.result["num_moves"],
        "own_share": outcome.real["own_share_of_schedule"],
        "wall_s": outcome.real["wall_s"],
    }


def slowest_stage_dd(outcome: Outcome) -> float:
    """Share of its time with work that the busiest stage idles between unequal decode batches.

    The others wait for it besides, as the LM head makes the last stage longer, balanced or not.
    """
    steps = outcome.run.steps
    loads = {s.step: Load(s.shape.prefill_tokens, s.shape.decodes) for s in steps}
    work = [(r.arrival_s, r.last_token_s) for r in outcome.records]
    busiest = max(stage_use(outcome.stages, loads, work), key=lambda use: use.busy_s)
    return busiest.bubbles.decode_decode_s / busiest.work_s


def rows_of(case: Case, found: dict[str, dict[str, Any]]) -> list[str]:
    """Table rows of a case; relative numbers are against `off`."""
    off = found["off"]
    rows = []
    for strategy, run in found.items():
        against = run["tok_per_s"] / off["tok_per_s"] - 1.0
        tpot = [
            f"{1e3 * run['tpot_s'][p]:.1f} ({run['tpot_s'][p] / off['tpot_s'][p] - 1:+.1%})"
            for p in ("p50", "p90", "p99")
        ]
        cells = [
            f"{case.title}, PP={case.pp_size}",
            f"{case.workload}, {run['rate']:g} ({case.load:.0%})",
            strategy,
            f"{100 * run['dd']:.2f}",
            f"{100 * run['slowest_dd']:.2f}",
            f"{100 * run['bubbles']:.1f}",
            f"{run['tok_per_s']:.0f} ({against:+.1%})",
            *tpot,
            f"{1e3 * run['ttft_p90_s']:.0f}",
            str(run["moves"]),
            f"{100 * run['own_share']:.1f}",
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def report(cases: Sequence[Case], cache: Path, seed: int) -> str:
    """The table; runs found in `cache` are not run again."""
    lines = [_HEAD]
    for case in cases:
        found = {name: _cached(case, name, cache, seed) for name in STRATEGIES}
        lines += rows_of(case, found)
    return "\n".join(lines) + "\n"


def goodput_table(case: Case, cache: Path, seed: int) -> str:
    """The highest rate at which P90 TTFT and TPOT meet their SLO, by bisection over the load."""
    lines = ["| strategy | goodput, requests/s | against `off` |", "|---|---|---|"]
    best: dict[str, float] = {}
    for name in STRATEGIES:
        low, high = GOODPUT_LOADS
        rate = 0.0
        while high - low > GOODPUT_STEP:
            load = round((low + high) / 2, 4)
            run = _cached(replace(case, load=load), name, cache, seed)
            if run["tpot_s"]["p90"] <= GOODPUT_TPOT_S and run["ttft_p90_s"] <= GOODPUT_TTFT_S:
                low, rate = load, run["rate"]
            else:
                high = load
        best[name] = rate
        lines.append(f"| {name} | {rate:g} | {rate / best['off']:.2f}x |")
    return "\n".join(lines) + "\n"


def _cached(case: Case, strategy: str, cache: Path, seed: int) -> dict[str, Any]:
    name = "-".join(str(value) for value in asdict(case).values()).replace(" ", "")
    path = cache / f"{name}-{strategy}-{seed}.json"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            found = measure_case(case, strategy, Path(folder), seed)
        path.write_text(json.dumps(found), encoding="utf-8")
    found = json.loads(path.read_text(encoding="utf-8"))
    print(case.title, case.pp_size, case.workload, strategy, found, flush=True)
    return dict(found)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.rebalance_report", description=__doc__)
    parser.add_argument("out", type=Path, help="Markdown file to write")
    parser.add_argument("--cache", type=Path, default=Path("out/rebalance"), help="finished runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, nargs="*", help="numbers of the cases, from 0")
    parser.add_argument("--goodput", type=int, nargs="*", default=[], help="cases to bisect")
    args = parser.parse_args(argv)
    _quiet()
    cases = CASES if args.case is None else [CASES[i] for i in args.case]
    table = report(cases, args.cache, args.seed)
    for case in [CASES[i] for i in args.goodput]:
        table += (
            f"\n{case.title}, PP={case.pp_size}, {case.workload}: goodput at P90 TTFT "
            f"{GOODPUT_TTFT_S:g} s and P90 TPOT {1e3 * GOODPUT_TPOT_S:g} ms\n\n"
        )
        table += goodput_table(case, args.cache, args.seed)
    made = ", ".join(f"{name} {version}" for name, version in versions().items())
    args.out.parent.mkdir(parents=True, exist_ok=True)
    text = _TEXT.format(seed=args.seed, about=__doc__, made=made)
    args.out.write_text(text + table, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
