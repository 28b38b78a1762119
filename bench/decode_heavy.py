"""Stock vLLM against the plugin with `auto`: five paired decode-heavy runs at PP=4 on the CPU.

`python -m bench.decode_heavy OUT.json`. Both servers are up all the time and serve the same
requests in turn, the one first in one pair and the other in the next, so that what else runs on the
machine strikes both alike. The token budget is vLLM's own in both: only decodes are moved. Greedy
tokens must be identical.
"""

import argparse
import json
import random
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from bench import demo_workload
from bench.demo import PP_SIZE, say
from bench.greedy_check import FIRST_PLAIN_TOKEN, VOCABULARY, GreedyRequest, complete
from bench.live_server import ROOT, LiveServer
from bench.tiny_model import make
from bench.versions import versions

PAIRS = 5
RATE, DURATION_S, SHRINK = 6.0, 8.0, 7.0
WARM_UP_S = 2.0  # of a run before the first pair, which is not counted
SETTINGS = {
    "PPBALANCE_CHUNK__STRATEGY": "fixed",
    "PPBALANCE_REBALANCE__STRATEGY": "auto",
    "PPBALANCE_ADMISSION__STRATEGY": "fcfs",
}
FIGURES = ("imbalance", "tok_per_s")

Sent = list[tuple[float, GreedyRequest]]  # seconds since the start, and what is asked


def workload(duration_s: float, seed: int) -> Sent:
    """The demo's lengths, swapped: short prompts and long outputs."""
    rng = random.Random(seed)
    words = range(FIRST_PLAIN_TOKEN, VOCABULARY)
    return [
        (a.time_s, GreedyRequest(tuple(rng.choices(words, k=a.output_tokens)), a.prompt_tokens))
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


def serve(server: LiveServer, sent: Sent, steps: Path) -> tuple[dict[str, float], list[list[int]]]:
    """One run: imbalance of the decodes, tokens a second; and the tokens."""
    before = len(steps.read_text().splitlines()) if steps.exists() else 0
    started = time.monotonic()

    def ask(arrival: tuple[float, GreedyRequest]) -> list[int]:
        time.sleep(max(started + arrival[0] - time.monotonic(), 0.0))
        return complete(server.url, str(server.model), arrival[1])

    with ThreadPoolExecutor(len(sent)) as pool:
        tokens = list(pool.map(ask, sent))
    seconds = time.monotonic() - started
    rows: list[dict[str, Any]] = [
        json.loads(line) for line in steps.read_text().splitlines()[before:]
    ]
    rate = sum(map(len, tokens)) / seconds
    return {"imbalance": imbalance(rows, PP_SIZE), "tok_per_s": rate}, tokens


def imbalance(rows: Sequence[dict[str, Any]], pp_size: int) -> float:
    """Standard deviation of decodes over the cohorts, empty ones too, as a share of their mean.

    0 where all carry alike, sqrt(pp_size - 1) where one carries all. `rows` are the micro-batches
    that are not empty. A decode that runs finds d of the N running requests beside it; the mean of
    d / N over all of them is the sum of (d / N)^2 over the cohorts.
    """
    alone = [row for row in rows if row["decodes"] and not row["prefills"]]
    decodes = sum(row["decodes"] for row in alone)
    if not decodes:
        return 0.0
    together = sum(row["decodes"] ** 2 / row["running"] for row in alone) / decodes
    return float(max(pp_size * together - 1.0, 0.0) ** 0.5)


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
            servers[name] = server_of(name, out)
            servers[name].spawn()
            stack.callback(servers[name].stop)
        for server in servers.values():
            server.wait()
        steps = {name: out / name / "steps.jsonl" for name in servers}
        for name, server in servers.items():
            serve(server, workload(WARM_UP_S, 0), steps[name])
        for seed in range(1, PAIRS + 1):
            sent = workload(DURATION_S, seed)
            order = sorted(servers, reverse=bool(seed % 2))
            found = {name: serve(servers[name], sent, steps[name]) for name in order}
            if found["stock"][1] != found["auto"][1]:
                raise RuntimeError(f"pair {seed}: the tokens differ")
            pairs.append({name: figures for name, (figures, _) in found.items()})
            say(f"pair {seed}, {len(sent)} requests, tokens identical: {pairs[-1]}")
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
    # Ends by an exception, so that the servers are stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
