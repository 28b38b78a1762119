"""Readers of public trace files; a bad row is reported with its file and line."""

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

HASH_BLOCK_TOKENS = 512  # Mooncake: tokens a hash id stands for


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace; `time_s` counts from the trace's first row."""

    time_s: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] | None = None


def _rows(
    path: str | Path,
    lines: Iterator[tuple[int, Any]],
    parse: Callable[[Any], TraceRow],
) -> list[TraceRow]:
    rows: list[TraceRow] = []
    for number, line in lines:
        try:
            row = parse(line)
            if row.prompt_tokens < 1 or row.output_tokens < 1:
                raise ValueError(
                    f"{row.prompt_tokens} prompt and {row.output_tokens} output tokens: "
                    "both must be at least 1"
                )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"no column {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{path}:{number}: {what}") from error
        rows.append(row)
    if not rows:
        raise ValueError(f"{path}: holds no requests")
    first = rows[0].time_s
    return [
        TraceRow(row.time_s - first, row.prompt_tokens, row.output_tokens, row.hash_ids)
        for row in rows
    ]


def _csv(path: str | Path) -> Iterator[tuple[int, dict[str, str]]]:
    with Path(path).open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        for row in reader:
            yield reader.line_num, row


def _seconds(timestamp: str) -> float:
    whole, _, fraction = timestamp.partition(".")
    digits = "".join(c for c in fraction.partition("+")[0] if c.isdigit())
    midnight = datetime(1970, 1, 1)
    return (datetime.fromisoformat(whole[:19]) - midnight).total_seconds() + float(f"0.{digits}0")


def read_azure(path: str | Path) -> list[TraceRow]:
    """Azure LLM inference trace, conversation or code: TIMESTAMP, ContextTokens, GeneratedTokens.

    Get it from github.com/Azure/AzurePublicDataset (CC-BY-4.0).
    """
    return _rows(
        path,
        _csv(path),
        lambda row: TraceRow(
            _seconds(row["TIMESTAMP"]), int(row["ContextTokens"]), int(row["GeneratedTokens"])
        ),
    )


def read_sharegpt(path: str | Path) -> list[TraceRow]:
    """ShareGPT lengths: num_prefill_tokens, num_decode_tokens; the file has no times.

    Get it from github.com/microsoft/sarathi-serve (Apache-2.0).
    """
    return _rows(
        path,
        _csv(path),
        lambda row: TraceRow(
            0.0, int(float(row["num_prefill_tokens"])), int(float(row["num_decode_tokens"]))
        ),
    )


def _mooncake_row(line: str) -> TraceRow:
    row = json.loads(line)
    length, hash_ids = int(row["input_length"]), tuple(int(h) for h in row["hash_ids"])
    blocks = -(-length // HASH_BLOCK_TOKENS)
    if len(hash_ids) != blocks:
        raise ValueError(f"{len(hash_ids)} hash_ids for {length} tokens: must be {blocks}")
    return TraceRow(float(row["timestamp"]) / 1e3, length, int(row["output_length"]), hash_ids)


def read_mooncake(path: str | Path) -> list[TraceRow]:
    """Mooncake trace, JSON lines with hash_ids of 512-token blocks.

    Get it from github.com/kvcache-ai/Mooncake (Apache-2.0).
    """
    with Path(path).open(encoding="utf-8") as file:
        return _rows(path, enumerate(file, start=1), _mooncake_row)
