"""What the demo prints: both servers side by side."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Outcome:
    """What one server did: tokens of the greedy check, client's metrics, micro-batches."""

    tokens: list[list[int]]
    metrics: dict[str, Any]
    steps: list[dict[str, Any]]


def decode_counts(steps: list[dict[str, Any]], pp_size: int) -> tuple[float, float, float]:
    """Decodes per micro-batch: mean, standard deviation, and widest less narrowest in a round.

    Rounds are pp_size micro-batches in a row; those with less than one decode each are left out.
    """
    counts = np.array([step["decodes"] for step in steps])
    rounds = counts[: len(counts) // pp_size * pp_size].reshape(-1, pp_size)
    rounds = rounds[rounds.sum(axis=1) >= pp_size]
    # Within a round, so that a changing load does not count as imbalance.
    deviation = float(np.sqrt(rounds.var(axis=1).mean()))
    return float(rounds.mean()), deviation, float(np.ptp(rounds, axis=1).mean())


def table_rows(outcome: Outcome, pp_size: int) -> dict[str, str]:
    """The printed figures of one server."""
    metrics = outcome.metrics
    mean, deviation, spread = decode_counts(outcome.steps, pp_size)
    chunks = [step["tokens"] for step in outcome.steps if step["prefills"]]
    low, middle, high = np.quantile(chunks, [0.1, 0.5, 1.0])
    return {
        "TTFT median / P90 (ms)": f"{metrics['median_ttft_ms']:.0f} / {metrics['p90_ttft_ms']:.0f}",
        "TPOT median / P90 (ms)": f"{metrics['median_tpot_ms']:.0f} / {metrics['p90_tpot_ms']:.0f}",
        "ITL P90 (ms)": f"{metrics['p90_itl_ms']:.0f}",
        "Output tokens/s": f"{metrics['output_throughput']:.0f}",
        "Requests/s": f"{metrics['request_throughput']:.2f}",
        "Micro-batches": str(len(outcome.steps)),
        "Decodes per micro-batch, mean": f"{mean:.1f}",
        "  standard deviation in a round": f"{deviation:.2f}",
        "  widest - narrowest in a round": f"{spread:.2f}",
        "Tokens with prefill, P10 / median / max": f"{low:.0f} / {middle:.0f} / {high:.0f}",
    }


def print_table(console: Console, outcomes: dict[str, Outcome], pp_size: int) -> None:
    """Both servers side by side."""
    table = Table(title=f"vllm serve, PP={pp_size}, CPU, tiny random-weight model")
    columns = {name: table_rows(outcome, pp_size) for name, outcome in outcomes.items()}
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    for label in next(iter(columns.values())):
        table.add_row(label, *(column[label] for column in columns.values()))
    console.print(table)
