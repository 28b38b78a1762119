"""Ground truth of stage time for the virtual pipeline: a measured profile, not a cost model.

It imports nothing of the plugin, so a policy is never judged by its own predictions.
"""

from bisect import bisect_left
from collections.abc import Callable
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from bench.batch import BatchShape

Seconds = Annotated[float, Field(ge=0.0, lt=10.0, allow_inf_nan=False)]
Table = tuple[tuple[Annotated[int, Field(ge=1)], Seconds], ...]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Host(_Model):
    """Host work that the measured steps held and the profile does not: a pipeline hides it."""

    contained_in_rows: bool
    step_s: Seconds
    decode_s: Seconds
    new_request_s: Seconds
    note: str


class FitError(_Model):
    """Absolute percentage errors of the fit; `heldout_*` on shapes the fit had not seen."""

    rows: int = Field(ge=1)
    shapes: int = Field(ge=1)
    median_percent: float = Field(ge=0.0)
    mean_percent: float = Field(ge=0.0)
    p90_percent: float = Field(ge=0.0)
    heldout_median_percent: float = Field(ge=0.0)
    heldout_mean_percent: float = Field(ge=0.0)
    heldout_p90_percent: float = Field(ge=0.0)


class Attention(_Model):
    """Attention of one layer, seconds.

    A prefill chunk of x tokens over L cached ones costs `prefill_pair_s * 2Lx +
    prefill_square_s * x^2` (equal where the kernel skips what the causal mask hides), plus
    `prefill_short_s * L * min(x, prefill_short_tokens)` because a short chunk cannot fill the GPU,
    plus `prefill_token_s * x + prefill_chunk_s`. Decodes cost `decode_context_s` a context token,
    `decode_s` each and `decode_batch_s` a micro-batch that has any.
    """

    prefill_pair_s: Seconds
    prefill_square_s: Seconds
    prefill_short_s: Seconds = 0.0
    prefill_short_tokens: int = Field(default=0, ge=0)
    prefill_token_s: Seconds = 0.0
    prefill_chunk_s: Seconds = 0.0
    decode_context_s: Seconds
    decode_s: Seconds = 0.0
    decode_batch_s: Seconds = 0.0


class LatencyProfile(_Model):
    """Stage time of one model on one GPU, from `configs/latency_profiles/*.yaml`.

    `linear_table` holds (tokens, seconds per layer) of everything but attention; between two rows
    time is interpolated, beyond the last it grows in proportion. A tile step is two rows one token
    apart. `cudagraph_capture_sizes` pads a batch up to the next captured size, as vLLM does.
    """

    name: str
    gpu: str
    model: str
    dtype: str
    hidden_size: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    num_hidden_layers: int = Field(ge=1)
    layers_measured: int = Field(ge=1)
    source: str
    licence: str
    notes: str = ""
    host: Host
    fit: FitError
    stage_s: Seconds = 0.0
    embedding_token_s: Seconds = 0.0
    lm_head_table: Table = Field(min_length=1)
    attention: Attention
    cudagraph_capture_sizes: tuple[Annotated[int, Field(ge=1)], ...] = ()
    linear_table: Table = Field(min_length=2)

    @field_validator("linear_table", "lm_head_table")
    @classmethod
    def _ascending(cls, table: Table) -> Table:
        for (before, _), (tokens, _) in pairwise(table):
            if tokens <= before:
                raise ValueError(f"tokens {tokens} after {before}: must be strictly ascending")
        return table

    @field_validator("cudagraph_capture_sizes")
    @classmethod
    def _sorted(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        if list(sizes) != sorted(set(sizes)):
            raise ValueError(f"{list(sizes)} must be strictly ascending")
        return sizes

    @cached_property
    def compiled(self) -> Callable[[BatchShape, int, bool, bool], float]:
        """`stage_seconds` as a closure over plain floats: about two microseconds a call."""
        return _compile(self)

    @classmethod
    def load(cls, path: str | Path) -> "LatencyProfile":
        """Read a YAML profile. Raises ValueError with the file, the field, its value and bound."""
        try:
            return cls.model_validate(yaml.safe_load(Path(path).read_text(encoding="utf-8")))
        except yaml.YAMLError as error:
            raise ValueError(f"{path}: not YAML: {error}") from error
        except ValidationError as error:
            wrong = "; ".join(
                f"{'.'.join(map(str, e['loc']))} = {e['input']!r}: {e['msg']}"
                for e in error.errors()
            )
            raise ValueError(f"{path}: {wrong}") from error

    def stage_seconds(
        self,
        shape: BatchShape,
        num_layers: int,
        embedding: bool = False,
        lm_head: bool = False,
    ) -> float:
        """GPU seconds of a stage of `num_layers` layers; an empty micro-batch takes none.

        `embedding` and `lm_head` add the ends of the model. The head runs on every decode token
        and on the last token of every prefill chunk.
        """
        return self.compiled(shape, num_layers, embedding, lm_head)


def load_profile(name: str) -> LatencyProfile:
    """A profile by file path, or by its name under `configs/latency_profiles`."""
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        folder = Path(__file__).resolve().parent.parent / "configs" / "latency_profiles"
        path = folder / f"{name}.yaml"
        if not path.is_file():
            known = ", ".join(sorted(p.stem for p in folder.glob("*.yaml")))
            raise ValueError(f"latency profile {name!r} is unknown; there are: {known}")
    return LatencyProfile.load(path)


def _interpolate(table: Table, at: int) -> float:
    index = bisect_left(table, at, key=lambda row: row[0])
    if index == 0:
        return table[0][1]
    if index == len(table):
        return table[-1][1] * at / table[-1][0]
    (left, before), (right, after) = table[index - 1], table[index]
    return before + (after - before) * (at - left) / (right - left)


def _dense(table: Table, sizes: tuple[int, ...] = ()) -> tuple[list[float], float]:
    """Seconds at 0, 1, ..., last row's tokens, padding applied; and seconds a token beyond."""
    padded = [0]
    for tokens in range(1, table[-1][0] + 1):
        index = bisect_left(sizes, tokens)
        padded.append(sizes[index] if index < len(sizes) else tokens)
    return [_interpolate(table, tokens) for tokens in padded], table[-1][1] / table[-1][0]


def _compile(profile: LatencyProfile) -> Callable[[BatchShape, int, bool, bool], float]:
    # Lists and local floats instead of models and bisection: the simulator calls this per step.
    linear, linear_beyond = _dense(profile.linear_table, profile.cudagraph_capture_sizes)
    head, head_beyond = _dense(profile.lm_head_table)
    a = profile.attention
    pairs_s, square_s = 2.0 * a.prefill_pair_s, a.prefill_square_s
    short_s, short = a.prefill_short_s, a.prefill_short_tokens
    token_s, chunk_s = a.prefill_token_s, a.prefill_chunk_s
    context_s, decode_s, decode_batch_s = a.decode_context_s, a.decode_s, a.decode_batch_s
    stage_s, embedding_s = profile.stage_s, profile.embedding_token_s

    def seconds(shape: BatchShape, num_layers: int, embedding: bool, lm_head: bool) -> float:
        if num_layers < 0:
            raise ValueError(f"num_layers = {num_layers}: must be at least 0")
        tokens, layer = shape.decode_tokens, 0.0
        for new, prefix in shape.prefills:
            tokens += new
            layer += new * (pairs_s * prefix + square_s * new + token_s) + chunk_s
            layer += short_s * prefix * (new if new < short else short)
        if tokens == 0:
            return 0.0
        if shape.decodes:
            layer += context_s * shape.decode_context + decode_s * shape.decodes + decode_batch_s
        layer += linear[tokens] if tokens < len(linear) else linear_beyond * tokens
        total = stage_s + num_layers * layer
        if embedding:
            total += embedding_s * tokens
        if lm_head:
            rows = shape.decode_tokens + len(shape.prefills)
            total += head[rows] if rows < len(head) else head_beyond * rows
        return total

    return seconds
