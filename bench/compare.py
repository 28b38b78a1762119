"""Results side by side: a column a run, a row a measure."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.parallel import load_result
from bench.served_record import load as load_served

Result = Mapping[str, Any]
_LATENCIES = ("ttft_s", "tpot_s", "itl_s", "e2el_s")


def load_results(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Records from files, and from all files of folders. Raises ValueError for what is none.

    A simulated run's record is a `.json` file, those of served runs are the lines of a `.jsonl`.
    """
    results: list[dict[str, Any]] = []
    for path in paths:
        files = sorted((*path.glob("*.json"), *path.glob("*.jsonl"))) if path.is_dir() else [path]
        for file in files:
            if file.suffix == ".jsonl":
                results += load_served(file)
            elif not file.name.endswith(".real.json"):
                results.append(_simulated(file))
    if not results:
        raise ValueError("no records of runs there")
    return results


def _simulated(file: Path) -> dict[str, Any]:
    record = load_result(file)
    if record is None:
        raise ValueError(f"{file}: not the record of a run")
    return record


def label(result: Result) -> str:
    """Policy and workload."""
    return f"{result['spec']['policy']['name']} on {result['spec']['workload']['name']}"


def rows(results: Sequence[Result], ratios: bool = False) -> list[tuple[str, list[str]]]:
    """(measure, one text a result), ready to print.

    With `ratios` each value is followed by its ratio to the first result's.
    """
    table: list[tuple[str, list[str]]] = []
    for latency in _LATENCIES:
        for part in ("mean", "p50", "p90", "p95", "p99"):
            name = f"{latency.removesuffix('_s').upper()} {part}, ms"
            values = [result["measures"].get(latency, {}).get(part) for result in results]
            table.append((name, _texts(values, 1e3, 1, ratios)))
    for name, digits in (("output_tok_per_s", 1), ("total_tok_per_s", 1), ("slo_attainment", 4)):
        values = [result["measures"].get(name) for result in results]
        table.append((name, _texts(values, 1.0, digits, ratios)))
    pipelines = [result.get("pipeline") for result in results]
    if any(pipelines):
        table += _pipeline_rows(results, pipelines)
    table.append(("requests", [str(result["workload"]["num_requests"]) for result in results]))
    table.append(("unfinished", [str(r["measures"]["num_unfinished"]) for r in results]))
    return table


def _pipeline_rows(
    results: Sequence[Result], pipelines: Sequence[Mapping[str, Any] | None]
) -> list[tuple[str, list[str]]]:
    """What only a simulation sees; a dash for a served run."""

    def row(name: str, value: Callable[[Mapping[str, Any]], str]) -> tuple[str, list[str]]:
        return name, ["-" if p is None else value(p) for p in pipelines]

    causes = next(p for p in pipelines if p is not None)["bubble_ratio_by_cause"]

    def cause_row(cause: str) -> tuple[str, list[str]]:
        name = f"  {cause.replace('_', '-')}"
        return row(name, lambda p: _text(p["bubble_ratio_by_cause"][cause], 1.0, 3))

    return [
        row("bubble ratio", lambda p: _text(p["bubble_ratio"], 1.0, 3)),
        *map(cause_row, causes),
        row("busy share", lambda p: " ".join(f"{share:.2f}" for share in p["busy_share"])),
        row("decode spread", lambda p: _text(p["decode_spread"]["max_minus_min"], 1.0, 2)),
        ("moves", [str(result.get("num_moves", "-")) for result in results]),
        ("preemptions", [str(result.get("preemptions", "-")) for result in results]),
    ]


def by_workload(results: Sequence[Result]) -> list[list[Result]]:
    """The results in groups that served the very same requests, in the order of their coming."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result["workload"]["sha256"], []).append(result)
    return list(groups.values())


def same_workload(results: Sequence[Result]) -> bool:
    """Whether all results served the very same requests."""
    return len({result["workload"]["sha256"] for result in results}) == 1


def draw(path: Path, results: Sequence[Result]) -> None:
    """Bars of attainment where all served the same requests, else latencies against rate."""
    from bench.figures import attainment_bars, latency_against_rate

    if same_workload(results):
        attainment_bars(path, results, label)
    else:
        latency_against_rate(path, results, label)


def _texts(values: Sequence[float | None], scale: float, digits: int, ratios: bool) -> list[str]:
    texts = [_text(value, scale, digits) for value in values]
    first = values[0]
    if not ratios or not first:
        return texts
    return [
        text if index == 0 or value is None else f"{text} ({value / first:.2f}x)"
        for index, (text, value) in enumerate(zip(texts, values, strict=True))
    ]


def _text(value: float | None, scale: float, digits: int) -> str:
    return "-" if value is None else f"{value * scale:.{digits}f}"
