"""`python -m bench.gpu.report RESULTS.json...`: the runs of `pp_serving` as Markdown tables."""

import argparse
import json
from pathlib import Path
from typing import Any

HEAD = (
    "| req/s | GPUs | setting | attainment | TTFT mean / P90 (s) | TPOT mean / P90 (ms) "
    "| output tok/s | our part / vLLM's of schedule(), median us |\n" + "|---" * 8 + "|"
)
DEFAULTS = {"chunk": "balanced", "rebalance": "auto", "admission": "on_time"}


def row(run: dict[str, Any], about: dict[str, Any]) -> str:
    """One run as a table row; `about` is the result it belongs to."""
    measures = run["measures"]
    ttft, tpot = measures["ttft_s"], measures["tpot_s"]
    own = "" if "stock" in run else f"{run['own_us']['p50']:.0f} / "
    rate = f"{run['rate']}{' swapped' if run.get('swapped') else ''}"
    return (
        f"| {rate} | {gpus(about)} | {name(run)} | {measures['slo_attainment']:.3f} "
        f"| {ttft['mean']:.2f} / {ttft['p90']:.2f} | {1e3 * tpot['mean']:.1f} / "
        f"{1e3 * tpot['p90']:.1f} | {measures['output_tok_per_s']:.0f} "
        f"| {own}{run['vllm_schedule_us']['p50']:.0f} |"
    )


def gpus(about: dict[str, Any]) -> str:
    """How the GPUs share the model, and what is unusual between them."""
    pipeline, variables = about.get("pipeline", {"pp": 2, "tp": 1}), about.get("environment", {})
    text = f"TP={pipeline['tp']}" if pipeline["tp"] > 1 else f"PP={pipeline['pp']}"
    if variables.get("NCCL_P2P_DISABLE") == "1":
        text += ", no direct link"
    if "NCCL_MAX_P2P_NCHANNELS" in variables:
        text += f", {variables['NCCL_MAX_P2P_NCHANNELS']} NCCL channel"
    return text


def name(run: dict[str, Any]) -> str:
    """The setting in words."""
    if "stock" in run:
        return f"stock {run['stock']}"
    settings = run["ppbalance"]
    chunk = settings.get("chunk", {})
    words = {key: settings.get(key, {}).get("strategy", word) for key, word in DEFAULTS.items()}
    tokens = f" {chunk['fixed_tokens']}" if "fixed_tokens" in chunk else ""
    order = f", {words['admission']}" if words["chunk"] == "balanced" else ""
    return f"{words['chunk']}{tokens}, {words['rebalance']}{order}"


def table(paths: list[Path]) -> str:
    """All served runs of several results, by rate; the hardware and versions above."""
    results = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    runs = [(run, one) for one in results for run in one["runs"] if "rate" in run]
    runs = [(run, one) for run, one in runs if not run.get("events")]  # timed apart
    runs.sort(key=lambda pair: (pair[0].get("swapped", False), pair[0]["rate"], name(pair[0])))
    about = ", ".join(f"{key} {value}" for key, value in results[0]["versions"].items())
    return "\n".join([about, "", HEAD, *(row(run, one) for run, one in runs)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="+")
    print(table(parser.parse_args().results))
