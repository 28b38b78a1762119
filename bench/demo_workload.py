"""The demo's arrivals and lengths, as a file for `vllm bench serve --dataset-name timed_trace`."""

import csv
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np

# Marginals of the Azure LLM inference trace 2023, conversation (Azure/AzurePublicDataset,
# CC-BY-4.0): token counts at these shares of its requests.
SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
AZURE_PROMPT = (2, 181, 207, 387, 403, 703, 1020, 1071, 1130, 1315, 2734, 4083, 4142)
AZURE_OUTPUT = (7, 41, 54, 77, 91, 103, 129, 177, 384, 400, 424, 451, 601)

MAX_PROMPT, MAX_OUTPUT = 2048, 1024
BLOCK_TOKENS = 16  # a prompt is named by one hash for each block of so many tokens


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: seconds since the start, and tokens in and out."""

    time_s: float
    prompt_tokens: int
    output_tokens: int


def synthetic(rate: float, duration_s: float, shrink: float, seed: int) -> list[Arrival]:
    """Poisson arrivals with the marginals above, each length divided by `shrink`."""
    rng = np.random.default_rng(seed)
    count = max(1, round(rate * duration_s))
    times = np.cumsum(rng.exponential(1.0 / rate, count))
    prompts = np.interp(rng.random(count) * SHARES[-1], SHARES, AZURE_PROMPT)
    outputs = np.interp(rng.random(count) * SHARES[-1], SHARES, AZURE_OUTPUT)
    return [
        _scaled(float(t), float(p), float(o), shrink)
        for t, p, o in zip(times, prompts, outputs, strict=True)
    ]


def from_trace(path: Path, rate: float, duration_s: float, shrink: float) -> list[Arrival]:
    """The first requests of a trace, its clock stretched so that they come at `rate`.

    CSV as Azure publishes it (TIMESTAMP, ContextTokens, GeneratedTokens), or JSON lines as
    Mooncake does (timestamp in ms, input_length, output_length).
    """
    rows = _json_rows(path) if path.suffix == ".jsonl" else _csv_rows(path)
    first = list(itertools.islice(rows, max(2, round(rate * duration_s))))
    if len(first) < 2 or first[-1][0] <= first[0][0]:
        raise ValueError(f"--trace {path}: needs at least two requests at increasing times")
    start = first[0][0]
    stretch = len(first) / rate / (first[-1][0] - start)
    return [_scaled((t - start) * stretch, p, o, shrink) for t, p, o in first]


def _json_rows(path: Path) -> Iterator[tuple[float, float, float]]:
    with path.open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            yield row["timestamp"] / 1e3, row["input_length"], row["output_length"]


def _csv_rows(path: Path) -> Iterator[tuple[float, float, float]]:
    with path.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            # Seven decimals in the file; Python's parser knows six.
            time = datetime.fromisoformat(row["TIMESTAMP"][:26])
            yield time.timestamp(), float(row["ContextTokens"]), float(row["GeneratedTokens"])


def _scaled(time_s: float, prompt: float, output: float, shrink: float) -> Arrival:
    return Arrival(
        time_s,
        min(max(round(prompt / shrink), 1), MAX_PROMPT),
        min(max(round(output / shrink), 2), MAX_OUTPUT),
    )


def write(arrivals: list[Arrival], path: Path) -> None:
    """Writes the arrivals for `vllm bench serve`; no two prompts share a block."""
    hashes = itertools.count()
    with path.open("w", encoding="utf-8") as file:
        for arrival in arrivals:
            blocks = -(-arrival.prompt_tokens // BLOCK_TOKENS)
            row = {
                "timestamp": arrival.time_s,
                "input_length": arrival.prompt_tokens,
                "output_length": arrival.output_tokens,
                "hash_ids": list(itertools.islice(hashes, blocks)),
            }
            file.write(json.dumps(row) + "\n")
