"""`PPBALANCE=1 vllm serve` on real GPUs, as clients see it: `python -m bench.gpu.serve_check OUT`.

Waits for the start-up measurement, streams completions at Poisson times, and keeps the
`ppbalance_*` series of vLLM's own page. Exit status 1 where a request was not answered or there is
no series. Unknown options go to `vllm serve`.
"""

import argparse
import json
import os
import re
import shutil
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.byte_tokenizer import write_tokenizer
from bench.gpu.models import SHAPES, write_model
from bench.live_server import LiveServer, tail
from bench.measures import measure
from bench.wall_clock.check import records_of
from bench.wall_clock.client import Call, send_all

PROFILE_LIMIT_S = 60.0
_MEASURED = re.compile(r"ppbalance: (measured \d+ micro-batches.*)|ppbalance: measuring ended")
_STARTED = re.compile(r"ppbalance is active.*")


@dataclass
class GpuServer(LiveServer):
    """`vllm serve` with random weights."""

    start_limit_s: float = 300.0

    def command(self) -> list[str]:
        """The command line."""
        return [
            *(sys.executable, "-m", "bench.vllm_cli", "serve", str(self.model)),
            *("--host", "127.0.0.1", "--port", str(self.port), "--load-format", "dummy"),
            *("--pipeline-parallel-size", str(self.pp_size), "--max-model-len", "16384"),
            *self.arguments,
        ]


def wait_for_profile(log: Path) -> float:
    """Seconds until the plugin has its stage times. Raises RuntimeError where it never has."""
    began = time.monotonic()
    while not _MEASURED.search(log.read_text(errors="replace")):
        if time.monotonic() - began > PROFILE_LIMIT_S:
            raise RuntimeError(f"nothing measured within {PROFILE_LIMIT_S} s: {tail(log)}")
        time.sleep(0.2)
    return time.monotonic() - began


def calls(rate: float, duration_s: float) -> list[Call]:
    """Chats of 64 to 3,000 prompt tokens and 32 to 300 outputs."""
    rng = np.random.RandomState(1)
    times = rng.exponential(1.0 / rate, int(rate * duration_s)).cumsum()
    found = []
    for number, at_s in enumerate(times):
        prompt = tuple(rng.randint(4, 260, rng.randint(64, 3000)).tolist())
        found.append(Call(f"r{number}", float(at_s), prompt, int(rng.randint(32, 300))))
    return found


def series(url: str) -> list[str]:
    """The plugin's lines on the server's page."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return [line for line in lines if line.startswith("ppbalance_")]


def serve(args: argparse.Namespace) -> dict[str, Any]:
    """Start, measure, serve, look at the metrics, stop."""
    model, log = args.out / "model", args.out / "server.log"
    write_model(model, args.model)
    write_tokenizer(model, 16384)
    variables = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    variables |= {"PPBALANCE": "1", "PPBALANCE_PROFILING__DIRECTORY": str(args.out / "profiles")}
    sent = calls(args.rate, args.duration)
    with GpuServer(model, args.pp, log, args.engine, variables) as server:
        profile_s = wait_for_profile(log)
        answers = send_all(server.url, str(model), sent, args.duration + 120.0)
        lines = series(server.url)
    text = log.read_text(errors="replace")
    found = {"wait_for_profile_s": profile_s, "sent": len(sent), "metrics": lines}
    found["answered"] = sum(answer.finished for answer in answers)
    found["errors"] = sorted({answer.error for answer in answers if answer.error})[:5]
    found["log"] = [m.group() for rule in (_STARTED, _MEASURED) for m in rule.finditer(text)]
    found["failed"] = "ppbalance failed" in text
    if found["answered"] == len(sent):
        measures = asdict(measure(records_of(answers)))
        found["measures"] = {k: measures[k] for k in ("ttft_s", "tpot_s", "output_tok_per_s")}
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", choices=SHAPES, default="qwen2.5-14b")
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--rate", type=float, default=8.0, help="requests/s")
    parser.add_argument("--duration", type=float, default=20.0, help="s")
    args, engine = parser.parse_known_args(argv)
    args.engine = engine
    shutil.rmtree(args.out / "profiles", ignore_errors=True)
    args.out.mkdir(parents=True, exist_ok=True)
    found = serve(args)
    (args.out / "serve.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(json.dumps({name: found[name] for name in found if name != "metrics"}))
    return int(found["answered"] < found["sent"] or not found["metrics"] or found["failed"])


if __name__ == "__main__":
    sys.exit(main())
