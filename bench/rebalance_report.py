"""What rebalancing is worth: `python -m bench.rebalance_report OUT.md`, a Markdown table.

Every strategy serves the same requests under the same fixed token budget. The engine is idle for a
minute before the first of them, in which `auto` and `tiered` measure the stages as they would in
service.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from bench.__main__ import _quiet
from bench.rebalance_cases import CASES, Case
from bench.rebalance_runs import GOODPUT_TTFT_S, Run, cached_run, goodput
from bench.versions import versions

STRATEGIES = ("off", "even_share", "tiered", "auto")
NOTHING = 0.005  # share of stage time; with less to remove there is nothing to remove
GOODPUT_TPOT_S = (0.08, 0.09)  # with `off`: micro-batches of just over one tile of 128
_HEAD = (
    "| pipeline | workload, requests/s | strategy | D-D bubble % | removable % | all bubbles % "
    "| output tok/s, whole run | second half of arrivals | TPOT P50 ms | P90 | P99 | TTFT P90 ms "
    "| held | ours % |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)

_TEXT = """Written by `python -m bench.rebalance_report`, seeds {seeds}. {about}
Simulated on latency profiles measured on these GPUs; `flat decodes` is a made-up profile of the
H200 one. Poisson arrivals (bursts: gamma, coefficient of variation 6), outputs of at most 300
tokens; the percentage beside the rate is of the work the stages can do. Means over the seeds; in
brackets: against `off`, with the standard error of that difference.

D-D bubble: stage time lost between decode-only micro-batches. A longer last stage, with the LM
head, makes the others wait between equal micro-batches too. `removable` is what a replay of the
same run does not have, in which the decode-only micro-batches of each round carry equal decodes and
context. In brackets: how much of that of `off` is gone, where that is at least {nothing:.1f} %;
with less there is nothing to remove. A run ends with few requests, when the stages are not full:
throughput is given for the second half of the time in which requests come in as well. `ours` is the
plugin's time on top of what vLLM's own scheduler takes.

Versions: {made}.

"""


def rows_of(case: Case, found: dict[str, list[Run]]) -> list[str]:
    """Table rows of a case, a list of runs a strategy; relative numbers are against `off`."""
    return [
        f"| {case.title}, PP={case.pp_size} | {case.workload}, {fmean(_each(runs, 'rate')):.4g} "
        f"({case.load:.0%}) | {name} | " + " | ".join(_cells(runs, found["off"])) + " |"
        for name, runs in found.items()
    ]


def _cells(runs: list[Run], off: list[Run]) -> list[str]:
    cells = [
        f"{100 * fmean(_each(runs, 'dd')):.2f}",
        _cut(_each(runs, "removable"), _each(off, "removable")),
        f"{100 * fmean(_each(runs, 'bubbles')):.1f}",
    ]
    cells += [
        _against(_each(runs, name), _each(off, name), "{:.0f}")
        for name in ("tok_per_s", "steady_tok_per_s")
    ]
    for name in ("p50", "p90", "p99"):
        ours, stock = ([1e3 * run["tpot_s"][name] for run in some] for some in (runs, off))
        cells.append(_against(ours, stock, "{:.1f}"))
    cells.append(f"{1e3 * fmean(_each(runs, 'ttft_p90_s')):.0f}")
    cells.append(f"{fmean(_each(runs, 'moves')):.0f}")
    cells.append(f"{100 * fmean(_each(runs, 'own_share')):.1f}")
    return cells


def _each(runs: Sequence[Run], name: str) -> list[float]:
    return [float(run[name]) for run in runs]


def _cut(left: list[float], before: list[float]) -> str:
    shown = f"{100 * max(fmean(left), 0.0):.2f}"
    if fmean(before) < NOTHING or left == before:
        return shown
    return f"{shown} ({fmean(left) / fmean(before) - 1:+.0%})"


def _against(values: list[float], off: list[float], form: str) -> str:
    shown = form.format(fmean(values))
    if values is off or values == off:
        return shown
    changes = [value / base - 1.0 for value, base in zip(values, off, strict=True)]
    change = f"{100 * fmean(changes):+.1f}"
    if len(changes) > 1:
        change += f"±{100 * stdev(changes) / len(changes) ** 0.5:.1f}"
    return f"{shown} ({change} %)"


def report(cases: Sequence[Case], cache: Path, seeds: Sequence[int]) -> str:
    """The table; runs found in `cache` are not run again."""
    lines = [_HEAD]
    for case in cases:
        found = {name: [cached_run(case, name, cache, s) for s in seeds] for name in STRATEGIES}
        lines += rows_of(case, found)
    return "\n".join(lines) + "\n"


def goodput_table(case: Case, cache: Path, seed: int) -> str:
    """Goodput of each strategy at each target of TPOT."""
    lines = [
        "| strategy | "
        + " | ".join(f"TPOT {1e3 * s:g} ms | against `off`" for s in GOODPUT_TPOT_S),
        "|---|" + "---|---|" * len(GOODPUT_TPOT_S),
    ]
    lines[0] += " |"
    best: dict[tuple[str, float], float] = {}
    for name in STRATEGIES:
        cells = [name]
        for slo_s in GOODPUT_TPOT_S:
            rate = best[name, slo_s] = goodput(case, name, slo_s, cache, seed)
            cells += [f"{rate:.1f}", f"{rate / best['off', slo_s]:.2f}x"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.rebalance_report", description=__doc__)
    parser.add_argument("out", type=Path, help="Markdown file to write")
    parser.add_argument("--cache", type=Path, default=Path("out/rebalance"), help="finished runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--case", type=int, nargs="*", help="numbers of the cases, from 0")
    parser.add_argument("--goodput", type=int, nargs="*", default=[], help="cases to bisect")
    args = parser.parse_args(argv)
    _quiet()
    cases = CASES if args.case is None else [CASES[i] for i in args.case]
    table = report(cases, args.cache, args.seeds)
    for case in [CASES[i] for i in args.goodput]:
        table += (
            f"\n{case.title}, PP={case.pp_size}, {case.workload}: goodput at P90 TTFT "
            f"{GOODPUT_TTFT_S:g} s, requests/s, by the target of P90 TPOT; seed {args.seeds[0]}\n\n"
        )
        table += goodput_table(case, args.cache, args.seeds[0])
    made = ", ".join(f"{name} {version}" for name, version in versions().items())
    args.out.parent.mkdir(parents=True, exist_ok=True)
    seeds = ", ".join(map(str, args.seeds))
    text = _TEXT.format(seeds=seeds, about=__doc__, made=made, nothing=100 * NOTHING)
    args.out.write_text(text + table, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
