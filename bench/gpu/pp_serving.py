"""Real pipeline parallelism on this machine's GPUs: one engine start, many scheduler settings.

`python -m bench.gpu.pp_serving --out DIR --plan FILE --trace AZURE_CSV` serves each entry of a
plan (YAML) with Azure conversation lengths and Poisson arrivals, changing only the scheduler's
settings on the live engine. Weights are random: outputs mean nothing, times do.
"""

import argparse
import gzip
import json
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from bench.gpu.live_engine import SHAPES, LiveEngine, finish_profile, serve, write_model
from bench.measures import Slo, measure
from bench.workloads import h200x2_pp2

SLO = Slo(2.0, 0.2)


def summary(entry: dict[str, Any], ran: dict[str, Any], slo: Slo) -> dict[str, Any]:
    """The figures of one run."""
    steps = [step for step in ran["steps"] if step["tok"]]
    figures = asdict(measure(ran["records"], slo))
    own, vllm = ([step[name] for step in steps] for name in ("own_us", "sch_us"))
    return {
        **entry,
        "measures": {k: v for k, v in figures.items() if k != "itl_s"},  # token times are not kept
        "wall_s": round(ran["wall_s"], 3),
        "steps": len(steps),
        "own_us": {"p50": float(np.median(own)), "p99": float(np.quantile(own, 0.99))},
        "vllm_schedule_us": {"p50": float(np.median(vllm)), "p99": float(np.quantile(vllm, 0.99))},
    }


def plan_entries(path: Path) -> Iterator[dict[str, Any]]:
    """Entries of the plan, its `repeats` expanded, in the order written."""
    plan = yaml.safe_load(path.read_text(encoding="utf-8"))
    for repeat in range(plan.get("repeats", 1)):
        for entry in plan["runs"]:
            yield {**entry, "repeat": repeat}


def arguments_of() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--trace", type=Path, required=True, help="Azure conversation CSV")
    parser.add_argument("--model", choices=SHAPES, default="qwen2.5-32b")
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--engine", type=json.loads, default={}, help="more engine arguments, JSON")
    parser.add_argument("--stop-after", type=float, default=1e9, help="s; no run starts later")
    return parser.parse_args()


def main() -> int:
    """Run a plan; figures in results.json, every step in steps.jsonl.gz."""
    arguments = arguments_of()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    began = time.monotonic()
    write_model(arguments.out / "model", arguments.model)
    own = {"chunk": {"strategy": "spread"}, "rebalance": {"strategy": "off"}}
    own["profiling"] = {"mode": "always", "directory": str(arguments.out)}
    options = {"additional_config": {"ppbalance": own}, **arguments.engine}
    live = LiveEngine(arguments.out / "model", arguments.pp, arguments.tp, options)
    results: dict[str, Any] = {"versions": versions(), "start_s": time.monotonic() - began}
    results["scheduler"] = [base.__name__ for base in type(live.scheduler).__mro__[:3]]
    results["profile"] = finish_profile(live) if arguments.pp > 1 else {}
    results["runs"] = []
    print("started", json.dumps(results), flush=True)
    with gzip.open(arguments.out / "steps.jsonl.gz", "wt", encoding="utf-8") as log:
        for number, entry in enumerate(plan_entries(arguments.plan)):
            if time.monotonic() - began > arguments.stop_after:
                print("no time left for", entry, flush=True)
                continue
            swapped = entry.get("swapped", False)
            requests = h200x2_pp2(arguments.trace, entry["rate"], entry["duration_s"], swapped)
            live.use(entry)
            ran = serve(live, requests, limit_s=240.0)
            results["runs"].append(summary(entry, ran, SLO))
            print(json.dumps(results["runs"][-1]), flush=True)
            for step in ran["steps"]:
                log.write(json.dumps({"run": number, **step}) + "\n")
            (arguments.out / "results.json").write_text(json.dumps(results, indent=1))
    return 0


def versions() -> dict[str, str]:
    """What this ran on."""
    import torch
    import vllm

    import vllm_ppbalance

    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "gpus": ", ".join(names),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "ppbalance": vllm_ppbalance.__version__,
    }


if __name__ == "__main__":
    raise SystemExit(main())
