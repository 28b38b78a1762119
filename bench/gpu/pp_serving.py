"""Real pipeline parallelism on this machine's GPUs: one engine start, many scheduler settings.

`python -m bench.gpu.pp_serving --out DIR --plan FILE --trace AZURE_CSV` serves each entry of a
plan (YAML) with Azure conversation lengths and Poisson arrivals, changing only the scheduler's
settings on the live engine. Weights are random: outputs mean nothing, times do. `--pp 1 --tp 2` is
tensor parallelism, for comparison.
"""

import argparse
import gzip
import json
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from bench.gpu.live_engine import LiveEngine, finish_profile
from bench.gpu.live_run import Ran, decode_spread, serve, serve_alone
from bench.gpu.models import SHAPES, write_model
from bench.gpu.stage_events import FIELDS, collect, install
from bench.measures import Slo, measure
from bench.workloads import BenchRequest, build, real_run_spec

SLO = Slo(2.0, 0.2)
LIMIT_S = 240.0  # for one run
ENVIRONMENT = ("NCCL_", "NEW_NCCL", "VLLM_", "TORCH_SYMM", "CUDA_MPS_ACTIVE", "CUDA_DEVICE")


def summary(entry: dict[str, Any], ran: Ran, slo: Slo, pp_size: int) -> dict[str, Any]:
    """The figures of one run; `arriving_tokens` a micro-batch, mean while requests arrive."""
    steps = [step for step in ran.steps if step["tok"] and "step" in step]
    figures = asdict(measure(ran.records, slo))
    most = max(step["run"] for step in steps) if "running" in entry else 0
    until_s = steps[0]["t"] + entry.get("duration_s", LIMIT_S)
    full = [step for step in steps if step["run"] >= 0.98 * most]
    own, vllm = ([step[name] for step in full] for name in ("own_us", "sch_us"))
    return {
        **entry,
        "measures": _known(figures),
        "wall_s": round(ran.wall_s, 3),
        "steps": len(steps),
        "arriving_tokens": float(np.mean([s["tok"] for s in steps if s["t"] <= until_s])),
        "running_most": int(most),
        "running_median": float(np.median([step["run"] for step in steps])),
        "decode_spread": decode_spread(ran.steps, pp_size),
        "own_us": {"p50": float(np.median(own)), "p99": float(np.quantile(own, 0.99))},
        "vllm_schedule_us": {"p50": float(np.median(vllm)), "p99": float(np.quantile(vllm, 0.99))},
    }


def _known(figures: dict[str, Any]) -> dict[str, Any]:
    """Without token gaps, whose times are not kept; None where there was nothing to measure."""
    kept = {name: value for name, value in figures.items() if name != "itl_s"}
    for name, value in kept.items():
        if isinstance(value, dict):
            kept[name] = {key: None if isnan(x) else x for key, x in value.items()}
    return kept


def plan_entries(path: Path) -> Iterator[dict[str, Any]]:
    """Entries of the plan, its `repeats` expanded, in the order written."""
    plan = yaml.safe_load(path.read_text(encoding="utf-8"))
    for repeat in range(plan.get("repeats", 1)):
        for entry in plan["runs"]:
            yield {**entry, "repeat": repeat}


def run(live: LiveEngine, entry: dict[str, Any], trace: Path) -> tuple[Ran, list[Any]]:
    """Serve one entry of a plan; with `events: true` also the rows of every stage.

    `prompts` are served with an output of `output` tokens, alone one after another, `pause_s`
    before each, or `queued` all at once; of `running` requests that many run at a time, `each`
    times as many in all; otherwise the Azure conversation lengths at `rate` for `duration_s`,
    `swapped` or not.
    """
    live.use(entry)
    if entry.get("events"):
        live.on_workers(install)
    if "prompts" in entry:
        lengths = [n for n in entry["prompts"] for _ in range(entry.get("each", 1))]
        sent = at_once(lengths, entry.get("output", 1))
        if entry.get("queued"):
            ran = serve(live, sent, LIMIT_S)
        else:
            ran = serve_alone(live, sent, LIMIT_S, entry.get("pause_s", 0.0))
    elif "running" in entry:
        lengths = [entry["prompt"]] * (entry["running"] * entry["each"])
        ran = serve(live, at_once(lengths, entry["output"]), LIMIT_S)
    else:
        count, most = int(entry["rate"] * entry["duration_s"]), entry.get("max_output", 2000)
        swapped = entry.get("swapped", False)
        spec = real_run_spec(trace, entry["rate"], count, swapped, most)
        ran = serve(live, build(spec), LIMIT_S)
    return ran, live.on_workers(collect) if entry.get("events") else []


def at_once(prompts: list[int], output: int) -> list[BenchRequest]:
    """Requests of these lengths, all there from the beginning."""
    return [BenchRequest(f"r{i}", 0.0, n, output) for i, n in enumerate(prompts)]


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


def start(arguments: argparse.Namespace) -> LiveEngine:
    """The engine."""
    write_model(arguments.out / "model", arguments.model)
    own = {"chunk": {"strategy": "spread"}, "rebalance": {"strategy": "off"}}
    own["profiling"] = {"mode": "always", "directory": str(arguments.out)}
    options = {"additional_config": {"ppbalance": own}, **arguments.engine}
    return LiveEngine(arguments.out / "model", arguments.pp, arguments.tp, options)


def main() -> int:
    """Run a plan; figures in results.json, every step in steps.jsonl.gz."""
    arguments = arguments_of()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # `on_workers` sends functions
    began, out = time.monotonic(), arguments.out
    live = start(arguments)
    results: dict[str, Any] = {"versions": versions(), "start_s": time.monotonic() - began}
    results["pipeline"] = {"pp": arguments.pp, "tp": arguments.tp, "engine": arguments.engine}
    results["environment"] = {k: v for k, v in os.environ.items() if k.startswith(ENVIRONMENT)}
    results["scheduler"] = [
        c.__name__ for c in (type(live.scheduler), *type(live.scheduler).__bases__)
    ]
    results["profile"] = finish_profile(live)
    results["runs"] = []
    print("started", json.dumps(results), flush=True)
    with gzip.open(out / "steps.jsonl.gz", "wt", encoding="utf-8") as log:
        for number, entry in enumerate(plan_entries(arguments.plan)):
            if time.monotonic() - began > arguments.stop_after:
                print("no time left for", entry, flush=True)
                continue
            ran, stages = run(live, entry, arguments.trace)
            results["runs"].append(summary(entry, ran, SLO, arguments.pp))
            print(json.dumps(results["runs"][-1]), flush=True)
            for step in ran.steps:
                log.write(json.dumps({"entry": number, **step}) + "\n")
            log.flush()
            if stages:
                text = json.dumps({"fields": FIELDS, "stages": stages})
                (out / f"stages-{number}.json").write_text(text, encoding="utf-8")
            (out / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
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
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # the one that is loaded
        "python": platform.python_version(),
        "ppbalance": vllm_ppbalance.__version__,
    }


if __name__ == "__main__":
    raise SystemExit(main())
