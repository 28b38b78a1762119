"""`python -m bench.gpu.report RESULTS.json...`: the runs of `pp_serving` as a Markdown table."""

import json
import sys
from pathlib import Path
from typing import Any

HEAD = (
    "| req/s | setting | attainment | TTFT mean / P90 (s) | TPOT mean / P90 (ms) | output tok/s "
    "| our part / vLLM's of schedule(), median us |\n|---|---|---|---|---|---|---|"
)


def row(run: dict[str, Any]) -> str:
    """One run as a table row."""
    measures = run["measures"]
    ttft, tpot = measures["ttft_s"], measures["tpot_s"]
    own = "" if "stock" in run else f"{run['own_us']['p50']:.0f} / "
    rate = f"{run['rate']}{' swapped' if run.get('swapped') else ''}"
    return (
        f"| {rate} | {name(run)} | {measures['slo_attainment']:.3f} "
        f"| {ttft['mean']:.2f} / {ttft['p90']:.2f} | {1e3 * tpot['mean']:.1f} / "
        f"{1e3 * tpot['p90']:.1f} | {measures['output_tok_per_s']:.0f} "
        f"| {own}{run['vllm_schedule_us']['p50']:.0f} |"
    )


def name(run: dict[str, Any]) -> str:
    """The setting in words."""
    if "stock" in run:
        return f"stock {run['stock']}"
    chunk, rebalance = run["ppbalance"]["chunk"], run["ppbalance"]["rebalance"]["strategy"]
    tokens = f" {chunk['fixed_tokens']}" if "fixed_tokens" in chunk else ""
    return f"{chunk['strategy']}{tokens}, {rebalance}"


def table(paths: list[Path]) -> str:
    """All runs of several results, by rate; the hardware and versions above."""
    results = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    versions = results[0]["versions"]
    runs = sorted(
        (run for result in results for run in result["runs"]),
        key=lambda run: (run.get("swapped", False), run["rate"], name(run)),
    )
    about = ", ".join(f"{key} {value}" for key, value in versions.items())
    return "\n".join([about, "", HEAD, *map(row, runs)])


if __name__ == "__main__":
    print(table([Path(path) for path in sys.argv[1:]]))
