"""Served runs as a table, and the highest rate that kept the targets."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.figures import sent_rate

Result = Mapping[str, Any]
_COLUMNS = ("workload", "seed", "req/s", "requests", "failed", "attainment", "met/s")
_WIDTH = 132  # of a file or a pipe
_LATENCIES = ("ttft_s", "tpot_s", "itl_s", "e2el_s")


def print_table(results: Sequence[Result]) -> None:
    """A row a run: attainment, requests a second that met the SLO, latencies in ms."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    table = Table()
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name == "workload" else "right")
    for latency in _LATENCIES:
        table.add_column(f"{latency.removesuffix('_s').upper()} ms\nmean/P90/P99", justify="right")
    for result in results:
        table.add_row(*_cells(result))
    console.print(table)


def _cells(result: Result) -> list[str]:
    measures, workload = result["measures"], result["spec"]["workload"]
    return [
        workload["name"],
        str(workload["seed"]),
        f"{_rate(result):.2f}",
        str(result["workload"]["num_requests"]),
        str(measures["num_unfinished"]),
        f"{measures['slo_attainment']:.3f}",
        f"{measures['met_per_s']:.2f}",
        *(
            "/".join(_ms(measures[name][part]) for part in ("mean", "p90", "p99"))
            for name in _LATENCIES
        ),
    ]


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.0f}"


def goodputs(results: Sequence[Result]) -> list[str]:
    """For each workload and label the highest rate sent at which P90 TTFT and TPOT met the SLO.

    Only a sweep has one: where a workload was sent at a single rate nothing is said.
    """
    rates: dict[str, list[tuple[float, bool]]] = {}
    for result in results:
        spec = result["spec"]
        name = f"{spec['policy']['name']} on {spec['workload']['name']}"
        rates.setdefault(name, []).append((_rate(result), _meets(result)))
    lines = []
    for name, runs in rates.items():
        sent = {rate for rate, _ in runs}
        if len(sent) < 2:
            continue
        # With several seeds every one of them has to hold.
        kept = sent - {rate for rate, met in runs if not met}
        best = f"{max(kept):g} req/s" if kept else f"under {min(sent):g} req/s"
        edge = ", the highest rate sent" if kept and max(kept) == max(sent) else ""
        lines.append(f"goodput at P90, {name}: {best}{edge}")
    return lines


def _rate(result: Result) -> float:
    """Requests a second: what was asked for, or what a trace sent."""
    return float(result["spec"]["workload"].get("rate") or sent_rate(result))


def _meets(result: Result) -> bool:
    return bool(result["measures"].get("meets_p90_rule"))
