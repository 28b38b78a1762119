"""One run on the wall clock and in virtual time: how far mean TPOT and throughput are apart.

`python -m bench.wall_clock.check` starts a server, sends the workload with real clients, and
simulates the same requests. Exit status 1 when a difference is over the limit.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.cli_options import add_spec_arguments, make_spec, spec_fields
from bench.live_server import ROOT
from bench.measures import Measures, RequestRecord, measure
from bench.sim_spec import SimSpec
from bench.sim_world import build_workload
from bench.wall_clock.client import Answer, Call, send_all
from bench.wall_clock.launch import Deployment
from bench.wall_clock.model import MAX_POSITION
from bench.wall_clock.running import ServerOptions, server_of
from bench.wall_clock.settings import WallClockSettings
from bench.workloads import BenchRequest, prompt_token_ids

FOLDER = ROOT / "out" / "wall_clock"
WARM_UP = 4  # requests that are not counted: the first of a server pay for imports
SPARE_S = 120.0


def deployment_of(spec: SimSpec, folder: Path = FOLDER) -> Deployment:
    """The server that a simulated run is of. Raises ValueError where there is none."""
    if spec.noise or spec.cold_start or spec.predictor_scale != 1.0:
        raise ValueError("noise, cold_start and predictor_scale are of virtual time only")
    return Deployment(
        policy=spec.policy,
        folder=folder,
        settings=WallClockSettings(
            profile=spec.profile,
            link=spec.link,
            pipeline_overhead=spec.pipeline_overhead,
            kv_cache_gib=spec.kv_cache_gib,
        ),
        pp_size=spec.pp_size,
        mode=spec.mode,
        max_num_seqs=spec.max_num_seqs,
        max_num_batched_tokens=spec.max_num_batched_tokens,
        # vLLM refuses contexts that the KV cache cannot hold.
        max_model_len=min(MAX_POSITION, (spec.num_gpu_blocks - 2) * spec.block_size),
        prefix_caching=spec.prefix_caching,
        stage_layers=spec.stage_layers,
    )


def calls_of(requests: Sequence[BenchRequest], shift_s: float = 0.0) -> list[Call]:
    """The requests as clients send them."""
    return [
        Call(r.request_id, r.arrival_s + shift_s, tuple(prompt_token_ids(r)), r.output_tokens)
        for r in requests
    ]


def records_of(answers: Sequence[Answer]) -> list[RequestRecord]:
    """What the clients measured. Raises RuntimeError if a request was not answered in full."""
    records = []
    for answer in answers:
        call = answer.call
        if not answer.finished or len(answer.token_ids) != call.max_tokens:
            raise RuntimeError(f"request {call.request_id} was not answered: {answer.error}")
        assert answer.first_token_s is not None
        assert answer.last_token_s is not None
        records.append(
            RequestRecord(
                call.request_id,
                call.send_s,
                answer.first_token_s,
                answer.last_token_s,
                len(call.prompt),
                len(answer.token_ids),
            )
        )
    return records


def on_the_wall_clock(spec: SimSpec, requests: Sequence[BenchRequest]) -> Measures:
    """Serve the requests in real time."""
    deployment = deployment_of(spec)
    log = FOLDER / f"server-{spec.mode}.log"
    first = min(r.arrival_s for r in requests)
    span_s = max(r.arrival_s for r in requests) - first
    warm = [replace(r, request_id=f"warm-{r.request_id}") for r in requests[:WARM_UP]]
    with server_of(deployment, ServerOptions(log)) as server:
        send_all(server.url, str(server.model), calls_of(warm, -first), SPARE_S)
        calls = calls_of(requests, -first)
        answers = send_all(server.url, str(server.model), calls, span_s + SPARE_S)
    return measure(records_of(answers))


def in_virtual_time(spec: SimSpec, requests: Sequence[BenchRequest]) -> Measures:
    """Serve the same requests in the simulator."""
    from bench.simulate import simulate

    return measure(simulate(spec, requests=requests).records)


def compare(real: Measures, virtual: Measures) -> dict[str, Any]:
    """Figures side by side, and by what share the real ones are larger."""
    pairs = {
        "mean TPOT (ms)": (real.tpot_s.mean * 1e3, virtual.tpot_s.mean * 1e3),
        "P90 TPOT (ms)": (real.tpot_s.p90 * 1e3, virtual.tpot_s.p90 * 1e3),
        "mean TTFT (ms)": (real.ttft_s.mean * 1e3, virtual.ttft_s.mean * 1e3),
        "output tok/s": (real.output_tok_per_s, virtual.output_tok_per_s),
    }
    return {
        name: {"wall clock": ours, "virtual": theirs, "difference": ours / theirs - 1.0}
        for name, (ours, theirs) in pairs.items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run both, print, judge."""
    parser = argparse.ArgumentParser(prog="python -m bench.wall_clock.check", description=__doc__)
    add_spec_arguments(parser)
    parser.add_argument("--policy", help="stock:8192 or ours:CHUNK/REBALANCE")
    parser.add_argument("--limit", type=float, default=0.1, help="largest difference (default 0.1)")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    args = parser.parse_args(argv)
    try:
        spec = make_spec(spec_fields(args), args.policy)
        requests = build_workload(spec, args.data)
        figures = compare(on_the_wall_clock(spec, requests), in_virtual_time(spec, requests))
    except (OSError, ValueError, RuntimeError) as error:
        parser.exit(2, f"{error}\n")
    print(f"{spec.policy.name}, {spec.mode}, {len(requests)} requests")
    for name, row in figures.items():
        print(
            f"{name:16} wall clock {row['wall clock']:9.2f}  virtual {row['virtual']:9.2f}  "
            f"{row['difference']:+.1%}"
        )
    if args.out:
        args.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    judged = (figures["mean TPOT (ms)"], figures["output tok/s"])
    return int(any(abs(row["difference"]) > args.limit for row in judged))


if __name__ == "__main__":
    sys.exit(main())
