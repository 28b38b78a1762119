"""Seeded workloads by name: arrivals and lengths put together into a list of requests."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import arrivals, lengths
from bench.trace_files import (
    HASH_BLOCK_TOKENS,
    TraceRow,
    read_azure,
    read_mooncake,
    read_sharegpt,
)

UNIQUE_BLOCKS = 1 << 40  # block ids from here on belong to one request each
BLOCK_ID_DIGITS = 5


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request to send. `hash_ids` name 512-token blocks that requests may share."""

    request_id: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """What to build. Times in seconds, lengths in tokens.

    With `path` the file's rows are used, else the committed model of the same name. `arrival` is
    trace (the file's own times), poisson, gamma or constant; trace is the default with a file that
    has times, poisson without. `rate` defaults to the trace's own mean. `window` [start, end)
    selects rows of a trace, or sets for how long to draw arrivals; `speed` multiplies the rate.
    `num_prompts` bounds the number of requests.
    """

    name: str
    path: str | Path | None = None
    arrival: str | None = None
    rate: float | None = None
    cv: float = 10.0
    window: tuple[float, float] | None = None
    num_prompts: int | None = None
    speed: float = 1.0
    sample_ratio: float = 1.0
    seed: int = 0
    prompt_range: tuple[int, int] | None = None
    output_range: tuple[int, int] | None = None
    max_output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class _Source:
    """Where lengths come from: a file reader, a generator, or both."""

    read: Callable[[str | Path], list[TraceRow]] | None = None
    draw: Callable[[WorkloadSpec, int], lengths.Pairs] | None = None
    model: str | None = None
    swapped: bool = False
    has_times: bool = True


def _uniform(spec: WorkloadSpec, count: int) -> lengths.Pairs:
    prompts, outputs = spec.prompt_range or (128, 2048), spec.output_range or (16, 512)
    return lengths.uniform(count, spec.seed, prompts, outputs)


def _long(spec: WorkloadSpec, count: int) -> lengths.Pairs:
    prompts, outputs = spec.prompt_range or (8192, 131072), spec.output_range or (64, 512)
    return lengths.long_context(count, spec.seed, prompts, outputs)


LONG_EVERY, LONG_PROMPT = 100, 100_000  # requests, tokens


def _mixed(spec: WorkloadSpec, count: int) -> lengths.Pairs:
    """Conversations, and now and then one with a very long prompt."""
    pairs = lengths.from_percentiles(lengths.load_model("azure_conv"), count, spec.seed)
    last = LONG_EVERY - 1
    return [
        (LONG_PROMPT if index % LONG_EVERY == last else prompt, output)
        for index, (prompt, output) in enumerate(pairs)
    ]


def _cnn(spec: WorkloadSpec, count: int) -> lengths.Pairs:
    return lengths.cnn(count, spec.seed)


WORKLOADS: dict[str, _Source] = {
    "azure_conv": _Source(read_azure, model="azure_conv"),
    "azure_swapped": _Source(read_azure, model="azure_conv", swapped=True),
    "azure_code": _Source(read_azure),
    "sharegpt": _Source(read_sharegpt, model="sharegpt", has_times=False),
    "mooncake": _Source(read_mooncake),
    "cnn": _Source(draw=_cnn),
    "cnn_r": _Source(draw=_cnn, swapped=True),
    "random": _Source(draw=_uniform),
    "long_context": _Source(draw=_long),
    "mixed_long": _Source(draw=_mixed),
}


def build(spec: WorkloadSpec) -> list[BenchRequest]:
    """The requests of `spec`, in order of arrival. Raises ValueError naming what is wrong."""
    source = WORKLOADS.get(spec.name)
    if source is None:
        raise ValueError(f"workload {spec.name!r} is unknown; there are: {', '.join(WORKLOADS)}")
    if spec.path is None:
        rows: list[TraceRow] = []
    elif source.read is None:
        raise ValueError(f"workload {spec.name!r} is synthetic: it takes no path")
    else:
        rows = source.read(spec.path)
    times_known = bool(rows) and source.has_times
    arrival = spec.arrival or ("trace" if times_known else "poisson")
    if arrival == "trace":
        if not times_known:
            raise ValueError(f"arrival = 'trace': workload {spec.name!r} has no times of its own")
        timed = [(rows[row], at) for row, at in _replay(spec, rows)]
    else:
        times = _arrivals(spec, arrival, _rate(spec, source, rows))
        timed = list(zip(_lengths(spec, source, rows, len(times)), times, strict=False))
    return _requests(timed[: spec.num_prompts], source.swapped, spec.max_output_tokens)


def _replay(spec: WorkloadSpec, rows: Sequence[TraceRow]) -> list[tuple[int, float]]:
    times = [row.time_s for row in rows]
    return arrivals.replay(times, spec.window, spec.speed, spec.sample_ratio, spec.seed)


def _rate(spec: WorkloadSpec, source: _Source, rows: Sequence[TraceRow]) -> float:
    if spec.rate is not None:
        return spec.rate * spec.speed * spec.sample_ratio
    if rows and rows[-1].time_s > 0.0:
        mean = len(rows) / rows[-1].time_s
    elif source.model and "requests_per_s" in lengths.load_model(source.model):
        mean = float(lengths.load_model(source.model)["requests_per_s"])
    else:
        raise ValueError(f"workload {spec.name!r} has no rate of its own: give rate")
    return mean * spec.speed * spec.sample_ratio


def _arrivals(spec: WorkloadSpec, arrival: str, rate: float) -> list[float]:
    count = spec.num_prompts
    if count is None:
        if spec.window is None:
            raise ValueError("num_prompts or window must say how many requests to draw")
        count = int(rate * (spec.window[1] - spec.window[0]) / spec.speed)
    if arrival == "poisson":
        return arrivals.poisson(rate, count, spec.seed)
    if arrival == "gamma":
        return arrivals.gamma(rate, count, spec.cv, spec.seed)
    if arrival == "constant":
        return arrivals.constant(rate, count)
    raise ValueError(f"arrival = {arrival!r}: must be trace, poisson, gamma or constant")


def _lengths(
    spec: WorkloadSpec, source: _Source, rows: list[TraceRow], count: int
) -> list[TraceRow]:
    if rows:
        if len(rows) < count:
            raise ValueError(f"{spec.path}: {len(rows)} rows, {count} requests wanted")
        return rows[:count]
    if source.draw is not None:
        pairs = source.draw(spec, count)
    elif source.model is not None:
        pairs = lengths.from_percentiles(lengths.load_model(source.model), count, spec.seed)
    else:
        raise ValueError(f"workload {spec.name!r} needs the path of its file")
    return [TraceRow(0.0, prompt, output) for prompt, output in pairs]


def _requests(
    timed: Sequence[tuple[TraceRow, float]], swapped: bool, max_output: int | None
) -> list[BenchRequest]:
    requests: list[BenchRequest] = []
    for index, (row, arrival_s) in enumerate(timed):
        prompt, output = row.prompt_tokens, row.output_tokens
        if swapped:
            prompt, output = output, prompt
        output = output if max_output is None else min(output, max_output)
        requests.append(BenchRequest(f"req-{index}", arrival_s, prompt, output, row.hash_ids))
    return requests


def real_run_spec(
    path: str | Path, rate: float, num_prompts: int, swapped: bool, max_output_tokens: int = 2000
) -> WorkloadSpec:
    """The workload of the project's real runs on GPUs, to the bit: Poisson arrivals with seed 1."""
    return WorkloadSpec(
        name="azure_swapped" if swapped else "azure_conv",
        path=str(path),
        arrival="poisson",
        rate=float(rate),
        num_prompts=num_prompts,
        seed=1,
        max_output_tokens=max_output_tokens,
    )


def h200x2_pp2(
    path: str | Path, rate: float, duration_s: float, swapped: bool = False
) -> list[BenchRequest]:
    """The requests of those runs."""
    return build(real_run_spec(path, rate, int(rate * duration_s), swapped))


def prompt_token_ids(request: BenchRequest, vocab_size: int = 32000) -> list[int]:
    """Token ids of the prompt: equal hash ids give equal blocks, others differ.

    A request without hash ids shares no block with any other. A block opens with its id in base
    `vocab_size`, which must be at least 512 so that no two ids collide.
    """
    if vocab_size < 512:
        raise ValueError(f"vocab_size = {vocab_size}: must be at least 512")
    ids: list[int] = []
    for block in block_ids(request):
        head = [block // vocab_size**digit % vocab_size for digit in range(BLOCK_ID_DIGITS)]
        ids += head
        ids += [(block + at) % vocab_size for at in range(HASH_BLOCK_TOKENS - BLOCK_ID_DIGITS)]
    return ids[: request.prompt_tokens]


def block_ids(request: BenchRequest) -> Iterator[int]:
    """A number for each 512-token block of the prompt: its hash ids, else some of its own."""
    if request.hash_ids is not None:
        yield from request.hash_ids
        return
    number = int.from_bytes(hashlib.sha256(request.request_id.encode()).digest()[:5], "big")
    for index in range(-(-request.prompt_tokens // HASH_BLOCK_TOKENS)):
        yield UNIQUE_BLOCKS + number + index


def workload_hash(requests: Sequence[BenchRequest]) -> str:
    """SHA-256 over all fields of all requests, for run records."""
    digest = hashlib.sha256()
    for r in requests:
        line = (r.request_id, r.arrival_s, r.prompt_tokens, r.output_tokens, r.hash_ids, r.priority)
        digest.update(f"{line!r}\n".encode())
    return digest.hexdigest()
