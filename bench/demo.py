"""Serves the same requests twice with real vLLM at PP=4 on the CPU, stock and with the plugin.

Checks that greedy tokens are identical, replays one workload, prints what changed.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any

from rich.console import Console
from rich.progress import Progress

from bench import demo_workload
from bench.demo_report import Outcome, decode_counts, print_table
from bench.greedy_check import complete_all, first_difference, greedy_requests
from bench.live_server import ROOT, LiveServer, cpu_environment
from bench.tiny_model import make
from bench.vllm_client import client, read_result, replay_command, wait_for

PP_SIZE = 4
NUM_CHECKED = 48
RESULT = "bench.json"
console = Console(width=100)


@dataclass(frozen=True)
class Contender:
    """One of the two servers."""

    name: str
    scheduler: str
    environment: Mapping[str, str]


def say(text: str) -> None:
    """A line of progress with the time."""
    console.print(f"[dim]{time.strftime('%H:%M:%S')}[/dim] {text}", highlight=False)


def bench_command(server: LiveServer, workload: Path, count: int, out: Path) -> list[str]:
    """`vllm bench serve`, streaming, with the arrival times of the workload file."""
    block = demo_workload.BLOCK_TOKENS
    return [
        *replay_command(server.url, str(server.model), workload, count, block, out / RESULT),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90"),
        *("--ready-check-timeout-sec", str(int(server.start_limit_s))),
    ]


def replayed(process: "Popen[bytes]", count: int, out: Path, limit_s: float) -> dict[str, Any]:
    """Waits for the client with a bar of answered requests; returns its metrics."""
    log = out / "bench.log"
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("answered", total=count)
        wait_for(process, log, limit_s, lambda done: progress.update(bar, completed=done))
    metrics = read_result(out / RESULT)
    if metrics["completed"] != count:
        raise RuntimeError(f"{metrics['completed']} of {count} requests answered, see {log}")
    return metrics


def serve(contender: Contender, options: argparse.Namespace, workload: Path, count: int) -> Outcome:
    """Starts one server, replays the workload, checks its tokens, and stops it."""
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
    (out / RESULT).unlink(missing_ok=True)
    # Started beside the server because both take long to import vLLM.
    command = bench_command(server, workload, count, out)
    with client(command, out / "bench.log", cpu_environment(1)) as process, server:
        say(f"{contender.name}: up; replaying {count} requests over {options.duration:.0f} s")
        metrics = replayed(process, count, out, 4 * options.duration + 120)
        rows = [json.loads(line) for line in steps.read_text().splitlines()]
        say(f"{contender.name}: {NUM_CHECKED} greedy requests at once")
        tokens = complete_all(server.url, str(server.model), greedy_requests(NUM_CHECKED))
    say(f"{contender.name}: stopped")
    return Outcome(tokens, metrics, rows)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, help="Azure CSV or Mooncake JSONL; default synthetic")
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second")
    parser.add_argument("--duration", type=float, default=40.0, help="seconds of arrivals")
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
    print_table(console, outcomes, PP_SIZE)
    console.print(f"ppbalance: {options.chunk} chunks, decodes by {options.rebalance}")
    difference = first_difference(balanced.tokens, stock.tokens)
    count = sum(map(len, stock.tokens))
    words = "identical" if difference is None else f"DIFFERENT, {difference}"
    console.print(f"Greedy tokens, {NUM_CHECKED} requests, {count} tokens: {words}")
    narrower = decode_counts(balanced.steps, PP_SIZE)[2] < decode_counts(stock.steps, PP_SIZE)[2]
    console.print(
        f"Decodes spread over micro-batches: {'narrower' if narrower else 'NOT narrower'}"
    )
    if (cores := len(os.sched_getaffinity(0))) < 2 * PP_SIZE:
        console.print(f"{PP_SIZE} stages share {cores} cores here: read the spread, not the speed.")
    return 0 if difference is None and narrower else 1


if __name__ == "__main__":
    # Ends by an exception, so that the servers are stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
