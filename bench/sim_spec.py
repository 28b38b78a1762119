"""What one simulated run is made of: frozen, validated, and JSON-able, so that a hash names it."""

import hashlib
import json
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from bench import measures
from bench.latency import LatencyProfile, load_profile
from bench.pipeline import LINKS
from bench.pipeline_overhead import CALIBRATED, PipelineOverhead
from bench.policies import Policy
from bench.workloads import WORKLOADS, WorkloadSpec

Count = Annotated[int, Field(ge=1, le=1 << 20)]
Seconds = Annotated[float, Field(ge=0.0, le=10.0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


@cache
def profile_of(name: str) -> LatencyProfile:
    """A latency profile, read once."""
    return load_profile(name)


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class HostModel(_Model):
    """Seconds of the engine's own thread.

    The defaults of `schedule_*` are a robust fit of vLLM's own `schedule()` over the step logs of
    the real two-H200 runs, those of `update_*` the time from a completion to the next schedule().
    """

    schedule_s: Seconds = 0.0001
    schedule_per_request_s: Seconds = 15e-6
    schedule_per_new_request_s: Seconds = 0.00015
    update_s: Seconds = 0.0002
    update_per_request_s: Seconds = 3e-6


class Slo(_Model):
    """Service level objective, seconds."""

    ttft_s: Positive = 2.0
    tpot_s: Positive = 0.2


class SimSpec(_Model):
    """One run. `kv_cache_gib` is the cache memory of one GPU, as vLLM prints it at start.

    `stage_layers` gives uneven splits; left out, layers split as vLLM splits them. `noise` is the
    standard deviation of the logarithm of each stage time. A run that is cut at `time_limit_s`
    counts what it left unfinished as a missed SLO. Relative workload paths are looked up in the
    data folder. `pipeline_overhead` applies `bench.pipeline_overhead` where it knows the profile.
    With `cold_start` the plugin has no stage times measured before the first request.
    `predictor_scale` multiplies whatever the plugin's cost model answers, so that it stays wrong.
    """

    workload: WorkloadSpec
    policy: Policy
    pp_size: Annotated[int, Field(ge=1, le=64)] = 4
    stage_layers: tuple[Count, ...] | None = None
    profile: str = "h200_qwen2.5-32b"
    link: str = "nvlink"
    mode: Literal["async", "sync"] = "async"
    max_num_seqs: Count = 512
    max_num_batched_tokens: Count = 8192
    kv_cache_gib: Positive = 96.0
    kv_bytes_per_token_layer: Count = 4096
    block_size: Count = 16
    prefix_caching: bool = False
    host: HostModel = HostModel()
    pipeline_overhead: bool = True
    cold_start: bool = False
    predictor_scale: Annotated[float, Field(ge=0.1, le=10.0)] = 1.0
    noise: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    seed: int = 0
    slo: Slo = Slo()
    time_limit_s: Positive | None = None

    @field_validator("workload", mode="before")
    @classmethod
    def _known_fields(cls, value: Any) -> Any:
        if isinstance(value, dict):
            known = WorkloadSpec.__dataclass_fields__
            for name in value:
                if name not in known:
                    raise ValueError(f"workload.{name}: unknown; there are: {', '.join(known)}")
        return value

    @model_validator(mode="after")
    def _checked(self) -> Self:
        if self.workload.name not in WORKLOADS:
            raise ValueError(
                f"workload {self.workload.name!r} is unknown; there are: {', '.join(WORKLOADS)}"
            )
        if self.link not in LINKS:
            raise ValueError(f"link {self.link!r} is unknown; there are: {', '.join(LINKS)}")
        layers = profile_of(self.profile).num_hidden_layers
        if self.stage_layers is None:
            return self
        if len(self.stage_layers) != self.pp_size or sum(self.stage_layers) != layers:
            raise ValueError(
                f"stage_layers = {list(self.stage_layers)}: must be {self.pp_size} numbers "
                f"(pp_size) that sum to {layers} (layers of {self.profile})"
            )
        return self

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of each stage."""
        if self.stage_layers is not None:
            return self.stage_layers
        return split_layers(profile_of(self.profile).num_hidden_layers, self.pp_size)

    @property
    def overhead(self) -> PipelineOverhead | None:
        """What a pipeline adds to the profile's times, where that has been measured."""
        return CALIBRATED.get(profile_of(self.profile).name) if self.pipeline_overhead else None

    @property
    def num_gpu_blocks(self) -> int:
        """KV-cache blocks: the stage with most layers has room for the fewest."""
        block_bytes = self.kv_bytes_per_token_layer * self.block_size * max(self.layers)
        return int(self.kv_cache_gib * (1 << 30) // block_bytes)

    def as_json(self) -> dict[str, Any]:
        """Plain values; `SimSpec.parse` reads them back."""
        fields = self.model_dump(mode="json", exclude={"workload"})
        fields["workload"] = workload_json(self.workload)
        plain: dict[str, Any] = json.loads(json.dumps(fields))
        return plain

    @property
    def key(self) -> str:
        """A name for the run: 16 hex digits of a hash over all its settings."""
        text = json.dumps(self.as_json(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @classmethod
    def parse(cls, fields: dict[str, Any]) -> "SimSpec":
        """A spec from plain values. Raises ValueError naming field, value and bound."""
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise ValueError(explain(error)) from None


def workload_json(workload: WorkloadSpec) -> dict[str, Any]:
    """Plain values of a workload, without what was left to its defaults of None."""
    fields = {name: value for name, value in asdict(workload).items() if value is not None}
    if "path" in fields:
        fields["path"] = Path(fields["path"]).as_posix()
    return fields


def parse_workload(fields: dict[str, Any]) -> WorkloadSpec:
    """A workload from plain values. Raises ValueError naming field, value and bound."""
    try:
        return TypeAdapter(WorkloadSpec).validate_python(fields)
    except ValidationError as error:
        raise ValueError(explain(error)) from None


def parse_slo(fields: dict[str, Any]) -> measures.Slo:
    """Targets from plain values. Raises ValueError naming field, value and bound."""
    try:
        slo = Slo.model_validate(fields)
    except ValidationError as error:
        raise ValueError(explain(error)) from None
    return measures.Slo(slo.ttft_s, slo.tpot_s)


def explain(error: ValidationError) -> str:
    """One line of what pydantic has to say: field = value: reason."""
    lines = []
    for detail in error.errors():
        name = ".".join(map(str, detail["loc"]))
        reason = detail["msg"].removeprefix("Value error, ")
        if detail["type"] == "extra_forbidden":
            reason = "no such field"
        plain = isinstance(detail["input"], (str, int, float, bool))
        shown = f"{name} = {detail['input']!r}" if plain else name
        lines.append(f"{shown}: {reason}" if shown else reason)
    return "; ".join(lines)


def split_layers(num_layers: int, pp_size: int) -> tuple[int, ...]:
    """vLLM's own split: what does not divide goes to the stages before the last, one each."""
    if pp_size > num_layers:
        raise ValueError(f"pp_size = {pp_size}: must be at most {num_layers}, the layers")
    split = [num_layers // pp_size] * pp_size
    for index in range(num_layers % pp_size):
        split[-2 - index] += 1
    return tuple(split)
