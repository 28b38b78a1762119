"""Real runs on several GPUs beside the same in virtual time: `... RESULTS.json --data DIR`."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.gpu.report import name
from bench.parallel import run_all
from bench.sim_spec import SimSpec
from bench.validate import AZURE_CONV, Numbers
from bench.workloads import real_run_spec

HEAD = (
    "| req/s | setting | attainment | TTFT mean, s | TTFT P90 | TPOT mean, ms | TPOT P90 "
    "| output tok/s |\n|---|---|---|---|---|---|---|---|"
)


def spec_of(run: dict[str, Any], lengths: Path, pp_size: int) -> SimSpec:
    """The run in virtual time, on the latency profile of one stage."""
    count, most = int(run["rate"] * run["duration_s"]), run.get("max_output", 2000)
    workload = real_run_spec(lengths, run["rate"], count, run.get("swapped", False), most)
    policy = {"name": name(run), "scheduler": "stock", "budget": run.get("stock")}
    if "stock" not in run:
        policy = {"name": name(run), "scheduler": "ours", "settings": run["ppbalance"]}
    return SimSpec.parse(
        {
            "workload": asdict(workload),
            "policy": policy,
            "pp_size": pp_size,
            "kv_cache_gib": 84.0,
        }
    )


def row(run: dict[str, Any], measures: dict[str, Any]) -> str:
    """Real / simulated."""
    real, ours = Numbers.of(run["measures"]), Numbers.of(measures)
    pairs = (
        (real.slo_attainment, ours.slo_attainment, "{:.3f}"),
        (real.ttft_mean_s, ours.ttft_mean_s, "{:.2f}"),
        (real.ttft_p90_s, ours.ttft_p90_s, "{:.2f}"),
        (1e3 * real.tpot_mean_s, 1e3 * ours.tpot_mean_s, "{:.1f}"),
        (1e3 * real.tpot_p90_s, 1e3 * ours.tpot_p90_s, "{:.1f}"),
        (real.output_tok_per_s, ours.output_tok_per_s, "{:.0f}"),
    )
    cells = [f"{form.format(a)} / {form.format(b)}" for a, b, form in pairs]
    return f"| {run['rate']} | {name(run)} | " + " | ".join(cells) + " |"


def main() -> int:
    """Print one Markdown table: real / simulated."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("out/against"), help="run records")
    arguments = parser.parse_args()
    lengths, found = arguments.data / AZURE_CONV, []
    for path in arguments.results:
        result = json.loads(path.read_text(encoding="utf-8"))
        pipeline = result.get("pipeline", {"pp": 2, "tp": 1})
        runs = [run for run in result["runs"] if "rate" in run and not run.get("events")]
        if pipeline["tp"] == 1:
            found += [(run, spec_of(run, lengths, pipeline["pp"])) for run in runs]
    records = run_all([spec for _, spec in found], arguments.out)
    print(HEAD)
    for (run, _), record in zip(found, records, strict=True):
        print(row(run, record["measures"]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
