"""What the workers must know that vLLM's own configuration does not say."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from bench.latency import load_profile
from bench.pipeline import LINKS
from bench.pipeline_overhead import CALIBRATED, PipelineOverhead

ENTRY = "wall_clock"  # in vLLM's --additional-config


class WallClockSettings(BaseModel):
    """GPU and link that the stages stand for; names as in `bench simulate`.

    `kv_cache_gib` is the cache memory of one GPU, as vLLM prints it at start.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    profile: str = "h200_qwen2.5-32b"
    link: str = "nvlink"
    pipeline_overhead: bool = True
    kv_cache_gib: float = Field(default=96.0, gt=0.0, le=4096.0, allow_inf_nan=False)

    @field_validator("profile")
    @classmethod
    def _readable(cls, name: str) -> str:
        try:
            load_profile(name)
        except OSError as error:
            raise ValueError(str(error)) from None
        return name

    @field_validator("link")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in LINKS:
            raise ValueError(f"there are: {', '.join(LINKS)}")
        return name

    @property
    def overhead(self) -> PipelineOverhead | None:
        """What a pipeline adds to the profile's times, where that has been measured."""
        return CALIBRATED.get(load_profile(self.profile).name) if self.pipeline_overhead else None

    @property
    def kv_cache_bytes(self) -> int:
        """Cache memory of one stage."""
        return int(self.kv_cache_gib * (1 << 30))

    @classmethod
    def of(cls, additional_config: Mapping[str, Any] | None) -> "WallClockSettings":
        """The `wall_clock` entry. Raises ValueError naming field, value and bound."""
        try:
            return cls.model_validate(dict((additional_config or {}).get(ENTRY, {})))
        except ValidationError as error:
            wrong = "; ".join(
                f"{ENTRY}.{'.'.join(map(str, e['loc']))} = {e['input']!r}: "
                f"{e['msg'].removeprefix('Value error, ')}"
                for e in error.errors()
            )
            raise ValueError(wrong) from None
