"""Stock vLLM against the plugin with `auto`: five paired decode-heavy runs at PP=4 on the CPU.

`python -m bench.decode_heavy OUT.json`. Both servers are up all the time and serve the same
requests in turn, the one first in one pair and the other in the next, so that what else runs on the
machine strikes both alike. The token budget is vLLM's own in both: only decodes are moved.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from bench import demo_workload
from bench.demo import PP_SIZE, client, replayed, say
from bench.demo_report import decode_counts
from bench.live_server import ROOT, LiveServer
from bench.tiny_model import make
from bench.versions import versions

PAIRS = 5
RATE, DURATION_S, SHRINK = 3.0, 15.0, 5.0
WARM_UP_S = 4.0  # of a run before the first pair, which is not counted
LIMIT_S = 240.0
SETTINGS = {
    "PPBALANCE_CHUNK__STRATEGY": "fixed",
    "PPBALANCE_REBALANCE__STRATEGY": "auto",
    "PPBALANCE_ADMISSION__STRATEGY": "fcfs",
}
FIGURES = ("deviation", "spread", "tok_per_s", "tpot_p90_ms")


def arrivals(duration_s: float, seed: int) -> list[demo_workload.Arrival]:
    """The demo's lengths, swapped: short prompts and long outputs."""
    return [
        replace(a, prompt_tokens=a.output_tokens, output_tokens=a.prompt_tokens)
        for a in demo_workload.synthetic(RATE, duration_s, SHRINK, seed)
    ]


def server_of(name: str, out: Path) -> LiveServer:
    """The server, not yet started."""
    ours = name == "auto"
    steps, profiles = out / name / "steps.jsonl", out / name / "profiles"
    steps.unlink(missing_ok=True)
    scheduler = "ObservedScheduler" if ours else "StockScheduler"
    environment = {"BENCH_STEPS": str(steps), "PPBALANCE_PROFILING__DIRECTORY": str(profiles)}
    return LiveServer(
        out / "tiny_model",
        PP_SIZE,
        out / name / "server.log",
        ("--scheduler-cls", f"bench.observed.{scheduler}"),
        environment | SETTINGS if ours else environment,
    )


def serve(server: LiveServer, sent: Sequence[demo_workload.Arrival], out: Path) -> dict[str, float]:
    """One run: spread of decodes over micro-batches, tokens a second, milliseconds."""
    out.mkdir(parents=True, exist_ok=True)
    workload, steps = out / "workload.jsonl", out / "steps.jsonl"
    demo_workload.write(list(sent), workload)
    before = len(steps.read_text().splitlines()) if steps.exists() else 0
    with client(server, workload, len(sent), out) as process:
        metrics = replayed(process, len(sent), out, LIMIT_S)
    rows: list[dict[str, Any]] = [
        json.loads(line) for line in steps.read_text().splitlines()[before:]
    ]
    mean, deviation, spread = decode_counts(rows, PP_SIZE)
    return {
        "decodes": mean,
        "deviation": deviation,
        "spread": spread,
        "tok_per_s": float(metrics["output_throughput"]),
        "tpot_p90_ms": float(metrics["p90_tpot_ms"]),
    }


def ratios(pairs: Sequence[dict[str, dict[str, float]]]) -> dict[str, list[float]]:
    """auto / stock of each pair, by figure."""
    return {
        name: [pair["auto"][name] / max(pair["stock"][name], 1e-9) for pair in pairs]
        for name in FIGURES
    }


def run_pairs(out: Path) -> list[dict[str, dict[str, float]]]:
    """Starts both servers, serves PAIRS workloads with each, stops them."""
    pairs = []
    with ExitStack() as stack:
        servers = {}
        for name in ("stock", "auto"):
            say(f"{name}: starting vllm serve, PP={PP_SIZE}")
            servers[name] = stack.enter_context(server_of(name, out))
        for name, server in servers.items():
            serve(server, arrivals(WARM_UP_S, 0), out / name)
        for seed in range(1, PAIRS + 1):
            sent = arrivals(DURATION_S, seed)
            order = sorted(servers, reverse=bool(seed % 2))
            found = {name: serve(servers[name], sent, out / name) for name in order}
            pairs.append(found)
            say(f"pair {seed}, {len(sent)} requests: {found}")
    return pairs


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.decode_heavy", description=__doc__)
    parser.add_argument("out", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    folder = ROOT / "out" / "decode_heavy"
    make(folder / "tiny_model")
    pairs = run_pairs(folder)
    found = ratios(pairs)
    summary = {name: {"median": median(values), "each": values} for name, values in found.items()}
    for name, values in summary.items():
        each = ", ".join(f"{value:.2f}" for value in found[name])
        print(f"{name}: auto / stock, median {values['median']:.2f} ({each})")
    result = {"versions": versions(), "pairs": pairs, "auto_over_stock": summary}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
