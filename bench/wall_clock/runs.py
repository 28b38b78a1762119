"""A spec's run on the wall clock, by real clients of a real server, and in virtual time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.live_server import ROOT
from bench.measures import Measures, RequestRecord, measure
from bench.sim_spec import HostModel, SimSpec
from bench.wall_clock.client import Answer, Call, send_all
from bench.wall_clock.host_time import TokenGaps, alone, full, slower
from bench.wall_clock.launch import Deployment
from bench.wall_clock.model import MAX_POSITION
from bench.wall_clock.running import ServerOptions, WallClockServer, server_of, wait_for_profile
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


@dataclass(frozen=True, slots=True)
class Served:
    """What the clients saw: of the requests that tell this host's time, and of the workload."""

    gaps: TokenGaps
    measures: Measures


def on_the_wall_clock(spec: SimSpec, requests: Sequence[BenchRequest]) -> Served:
    """Serve the requests in real time, after those that tell this host's time."""
    from bench.warm_start import needs_model

    deployment = deployment_of(spec)
    log = FOLDER / f"server-{spec.mode}.log"
    first = min(r.arrival_s for r in requests)
    span_s = max(r.arrival_s for r in requests) - first
    warm = [replace(r, request_id=f"warm-{r.request_id}") for r in requests[:WARM_UP]]
    with server_of(deployment, ServerOptions(log)) as server:
        if spec.policy.scheduler == "ours" and needs_model(spec):
            wait_for_profile(log)
        send_all(server.url, str(server.model), calls_of(warm, -first), SPARE_S)
        gaps = real_gaps(server, fitting(spec))
        calls = calls_of(requests, -first)
        answers = send_all(server.url, str(server.model), calls, span_s + SPARE_S)
    return Served(gaps, measure(records_of(answers)))


def fitting(spec: SimSpec) -> list[BenchRequest]:
    """Requests that fill the pipeline of a spec, a micro-batch each."""
    return full(spec.pp_size, spec.policy.budget or spec.max_num_batched_tokens)


def real_gaps(server: WallClockServer, many: Sequence[BenchRequest]) -> TokenGaps:
    """Mean token gaps of requests one after the other, and of `many` at once."""
    lone = []
    for request in alone():
        calls = calls_of([request], -request.arrival_s)
        lone += records_of(send_all(server.url, str(server.model), calls, SPARE_S))
    together = records_of(send_all(server.url, str(server.model), calls_of(many), SPARE_S))
    return TokenGaps(measure(lone).tpot_s.mean, measure(together).tpot_s.mean)


def virtual_gaps(spec: SimSpec, extra_s: float) -> TokenGaps:
    """The same in virtual time, with a host that takes `extra_s` more a round."""
    slow = with_host(spec, slower(spec.host, extra_s))
    return TokenGaps(*(in_virtual_time(slow, r).tpot_s.mean for r in (alone(), fitting(spec))))


def in_virtual_time(spec: SimSpec, requests: Sequence[BenchRequest]) -> Measures:
    """Serve the same requests in the simulator."""
    from bench.simulate import simulate

    return measure(simulate(spec, requests=requests).records)


def with_host(spec: SimSpec, host: HostModel) -> SimSpec:
    """The same run beside another host."""
    return spec.model_copy(update={"host": host})
