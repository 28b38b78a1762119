"""What a spec stands for: its requests as they are sent, and its pipeline of stages."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import overload

from bench.engine_types import RequestSpec
from bench.pipeline import LINKS, Activations, Pipeline
from bench.sim_spec import SimSpec, profile_of
from bench.stages import stage_time
from bench.workloads import BenchRequest, WorkloadSpec, build, prompt_token_ids


class _Prompt(Sequence[int]):
    """Token ids of a prompt, made when they are read: a long trace would fill the memory."""

    def __init__(self, request: BenchRequest) -> None:
        self._request = request

    def __len__(self) -> int:
        return self._request.prompt_tokens

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return prompt_token_ids(self._request)[index]

    def __iter__(self) -> Iterator[int]:
        return iter(prompt_token_ids(self._request))


def build_workload(spec: SimSpec, data: Path | None = None) -> list[BenchRequest]:
    """The requests of a spec."""
    return build_requests(spec.workload, data)


def build_requests(workload: WorkloadSpec, data: Path | None = None) -> list[BenchRequest]:
    """The requests; a relative path in the workload is looked up in `data`."""
    if workload.path is not None:
        path = Path(workload.path) if data is None else data / workload.path
        if not path.is_file():
            raise ValueError(f"{path}: no such trace file; --data or PPBALANCE_DATA says where")
        workload = replace(workload, path=path)
    requests = build(workload)
    if not requests:
        raise ValueError(f"workload {workload.name!r}: no requests in window {workload.window}")
    return requests


def make_pipeline(spec: SimSpec) -> Pipeline:
    """Stages of the spec's profile and layers, embedding on the first, LM head on the last."""
    profile, layers = profile_of(spec.profile), spec.layers
    return Pipeline(
        [stage_time(profile, layers, index, spec.overhead) for index in range(len(layers))],
        links=LINKS[spec.link],
        activations=Activations(profile.hidden_size),
        noise=spec.noise,
        seed=spec.seed,
    )


def sent(requests: Sequence[BenchRequest], token_ids: bool) -> Iterator[RequestSpec]:
    """The requests as the engine takes them, with token ids where prefixes matter."""
    for r in requests:
        prompt = _Prompt(r) if token_ids else r.prompt_tokens
        yield RequestSpec(r.request_id, r.arrival_s, prompt, r.output_tokens, r.priority)
