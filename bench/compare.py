"""Results side by side: a column a run, a row a measure."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.parallel import load_result

Result = Mapping[str, Any]
_LATENCIES = ("ttft_s", "tpot_s", "itl_s", "e2el_s")


def load_results(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Records from files, and from all files of folders. Raises ValueError for what is none."""
    results = []
    for path in paths:
        files = sorted(path.glob("*.json")) if path.is_dir() else [path]
        files = [file for file in files if not file.name.endswith(".real.json")]
        for file in files:
            record = load_result(file)
            if record is None:
                raise ValueError(f"{file}: not the record of a run")
            results.append(record)
    if not results:
        raise ValueError("no records of runs there")
    return results


def label(result: Result) -> str:
    """Policy and workload."""
    return f"{result['spec']['policy']['name']} on {result['spec']['workload']['name']}"


def rows(results: Sequence[Result]) -> list[tuple[str, list[str]]]:
    """(measure, one text a result), ready to print."""
    table: list[tuple[str, list[str]]] = []
    for latency in _LATENCIES:
        for part in ("mean", "p50", "p90", "p99"):
            name = f"{latency.removesuffix('_s').upper()} {part}, ms"
            values = [result["measures"].get(latency, {}).get(part) for result in results]
            table.append((name, [_text(value, 1e3, 1) for value in values]))
    plain = (("output_tok_per_s", 1), ("total_tok_per_s", 1), ("slo_attainment", 4))
    for name, digits in plain:
        values = [result["measures"].get(name) for result in results]
        table.append((name, [_text(value, 1.0, digits) for value in values]))
    pipelines = [result["pipeline"] for result in results]
    table.append(("bubble ratio", [_text(p["bubble_ratio"], 1.0, 3) for p in pipelines]))
    for cause in pipelines[0]["bubble_ratio_by_cause"]:
        shares = [p["bubble_ratio_by_cause"][cause] for p in pipelines]
        table.append((f"  {cause.replace('_', '-')}", [_text(s, 1.0, 3) for s in shares]))
    busy = [" ".join(f"{share:.2f}" for share in p["busy_share"]) for p in pipelines]
    table.append(("busy share", busy))
    spread = [p["decode_spread"]["max_minus_min"] for p in pipelines]
    table.append(("decode spread", [_text(value, 1.0, 2) for value in spread]))
    table.append(("moves", [str(result["num_moves"]) for result in results]))
    table.append(("preemptions", [str(result["preemptions"]) for result in results]))
    table.append(("requests", [str(result["workload"]["num_requests"]) for result in results]))
    table.append(("unfinished", [str(r["measures"]["num_unfinished"]) for r in results]))
    return table


def same_workload(results: Sequence[Result]) -> bool:
    """Whether all results served the very same requests."""
    return len({result["workload"]["sha256"] for result in results}) == 1


def _text(value: float | None, scale: float, digits: int) -> str:
    return "-" if value is None else f"{value * scale:.{digits}f}"
