"""Serves the same requests twice with real vLLM at PP=4 on the CPU, stock and with the plugin.

Checks that greedy tokens are identical, replays one workload, prints what changed.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench import demo_workload
from bench.greedy_check import complete_all, first_difference, greedy_requests
from bench.live_server import ROOT, LiveServer, cpu_environment, stop_group, tail
from bench.tiny_model import make

PP_SIZE = 4
NUM_CHECKED = 48
console = Console(width=100)


@dataclass(frozen=True)
class Contender:
    """One of the two servers."""

    name: str
    scheduler: str
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Outcome:
    """What one server did: tokens of the greedy check, client's metrics, micro-batches."""

    tokens: list[list[int]]
    metrics: dict[str, Any]
    steps: list[dict[str, Any]]


def say(text: str) -> None:
    """A line of progress with the time."""
    console.print(f"[dim]{time.strftime('%H:%M:%S')}[/dim] {text}", highlight=False)


def bench_command(server: LiveServer, workload: Path, count: int, result: Path) -> list[str]:
    """`vllm bench serve`, streaming, with the arrival times of the workload file."""
    return [
        *(sys.executable, "-m", "bench.vllm_cli", "bench", "serve"),
        *("--model", str(server.model), "--base-url", server.url),
        *("--dataset-name", "timed_trace", "--dataset-path", str(workload)),
        *("--timed-trace-chunk-hash-size", str(demo_workload.BLOCK_TOKENS)),
        *("--num-prompts", str(count), "--ignore-eos", "--temperature", "0"),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90"),
        *("--save-result", "--result-dir", str(result.parent), "--result-filename", result.name),
    ]


def replay(server: LiveServer, workload: Path, count: int, out: Path, limit_s: float) -> Any:
    """The client's metrics for one replay; its progress bar goes to the terminal."""
    result = out / "bench.json"
    result.unlink(missing_ok=True)
    with (out / "bench.log").open("wb") as log:
        process = subprocess.Popen(
            bench_command(server, workload, count, result),
            cwd=ROOT,
            # The client draws prompts by Python's hash: fixed, so both servers get the same.
            env=cpu_environment(1) | {"PYTHONHASHSEED": "0", "VLLM_LOGGING_LEVEL": "ERROR"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=None if sys.stderr.isatty() else log,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
        finally:
            stop_group(process)
    if code or not result.is_file():
        raise RuntimeError(f"vllm bench serve ended with code {code}:\n{tail(out / 'bench.log')}")
    return json.loads(result.read_text())


def serve(contender: Contender, options: argparse.Namespace, workload: Path, count: int) -> Outcome:
    """Starts one server, checks its tokens, replays the workload, and stops it."""
    out: Path = options.out / contender.name
    out.mkdir(parents=True, exist_ok=True)
    steps = out / "steps.jsonl"
    steps.unlink(missing_ok=True)
    server = LiveServer(
        options.out / "tiny_model",
        PP_SIZE,
        out / "server.log",
        ("--scheduler-cls", contender.scheduler),
        {**contender.environment, "BENCH_STEPS": str(steps)},
    )
    say(f"{contender.name}: starting vllm serve, PP={PP_SIZE} (log: {server.log})")
    with server:
        say(f"{contender.name}: up; {NUM_CHECKED} greedy requests at once")
        tokens = complete_all(server.url, str(server.model), greedy_requests(NUM_CHECKED))
        before = len(steps.read_text().splitlines())
        say(f"{contender.name}: replaying {count} requests over {options.duration:.0f} s")
        metrics = replay(server, workload, count, out, 4 * options.duration + 120)
        rows = [json.loads(line) for line in steps.read_text().splitlines()[before:]]
    say(f"{contender.name}: stopped")
    if metrics["completed"] != count:
        raise RuntimeError(f"{contender.name}: {metrics['completed']} of {count} requests answered")
    return Outcome(tokens, metrics, rows)


def decode_counts(steps: list[dict[str, Any]]) -> tuple[float, float, float]:
    """Decodes per micro-batch: mean, standard deviation, and widest less narrowest in a round.

    Rounds are pp_size micro-batches in a row; those with less than one decode each are left out.
    """
    counts = np.array([step["decodes"] for step in steps])
    rounds = counts[: len(counts) // PP_SIZE * PP_SIZE].reshape(-1, PP_SIZE)
    rounds = rounds[rounds.sum(axis=1) >= PP_SIZE]
    # Within a round, so that a changing load does not count as imbalance.
    deviation = float(np.sqrt(rounds.var(axis=1).mean()))
    return float(rounds.mean()), deviation, float(np.ptp(rounds, axis=1).mean())


def table_rows(outcome: Outcome) -> dict[str, str]:
    """The printed figures of one server."""
    metrics = outcome.metrics
    mean, deviation, spread = decode_counts(outcome.steps)
    chunks = [step["tokens"] for step in outcome.steps if step["prefills"]]
    low, middle, high = np.quantile(chunks, [0.1, 0.5, 1.0])
    return {
        "TTFT median / P90 (ms)": f"{metrics['median_ttft_ms']:.0f} / {metrics['p90_ttft_ms']:.0f}",
        "TPOT median / P90 (ms)": f"{metrics['median_tpot_ms']:.0f} / {metrics['p90_tpot_ms']:.0f}",
        "ITL P90 (ms)": f"{metrics['p90_itl_ms']:.0f}",
        "Output tokens/s": f"{metrics['output_throughput']:.0f}",
        "Requests/s": f"{metrics['request_throughput']:.2f}",
        "Micro-batches": str(len(outcome.steps)),
        "Decodes per micro-batch, mean": f"{mean:.1f}",
        "  standard deviation in a round": f"{deviation:.2f}",
        "  widest - narrowest in a round": f"{spread:.2f}",
        "Tokens with prefill, P10 / median / max": f"{low:.0f} / {middle:.0f} / {high:.0f}",
    }


def print_table(outcomes: dict[str, Outcome]) -> None:
    """Both servers side by side."""
    table = Table(title=f"vllm serve, PP={PP_SIZE}, CPU, tiny random-weight model")
    columns = {name: table_rows(outcome) for name, outcome in outcomes.items()}
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    for label in next(iter(columns.values())):
        table.add_row(label, *(column[label] for column in columns.values()))
    console.print(table)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, help="Azure CSV or Mooncake JSONL; default synthetic")
    parser.add_argument("--rate", type=float, default=6.0, help="requests a second")
    parser.add_argument("--duration", type=float, default=45.0, help="seconds of arrivals")
    parser.add_argument("--shrink", type=float, default=4.0, help="divides the lengths")
    parser.add_argument("--chunk", default="greedy", help="chunk.strategy of the plugin")
    parser.add_argument("--rebalance", default="even_share", help="rebalance.strategy")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "demo")
    return parser.parse_args()


def main() -> int:
    """Runs both servers, one after the other; 0 if the tokens are identical and the spread fell."""
    options = parse()
    options.out = options.out.resolve()
    make(options.out / "tiny_model")
    load = (options.rate, options.duration, options.shrink)
    if options.trace:
        arrivals = demo_workload.from_trace(options.trace, *load)
    else:
        arrivals = demo_workload.synthetic(*load, options.seed)
    workload = options.out / "workload.jsonl"
    demo_workload.write(arrivals, workload)
    ours = {
        "PPBALANCE_CHUNK__STRATEGY": options.chunk,
        "PPBALANCE_REBALANCE__STRATEGY": options.rebalance,
    }
    contenders = [
        Contender("stock", "bench.observed.StockScheduler", {}),
        Contender("ppbalance", "bench.observed.ObservedScheduler", ours),
    ]
    outcomes = {c.name: serve(c, options, workload, len(arrivals)) for c in contenders}
    stock, balanced = outcomes.values()
    print_table(outcomes)
    difference = first_difference(balanced.tokens, stock.tokens)
    count = sum(map(len, stock.tokens))
    words = "identical" if difference is None else f"DIFFERENT, {difference}"
    console.print(f"Greedy tokens, {NUM_CHECKED} requests, {count} tokens: {words}")
    narrower = decode_counts(balanced.steps)[2] < decode_counts(stock.steps)[2]
    console.print(
        f"Decodes spread over micro-batches: {'narrower' if narrower else 'NOT narrower'}"
    )
    return 0 if difference is None and narrower else 1


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
