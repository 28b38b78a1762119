"""Records of served runs: what vLLM's client saw of each request, and the measures of it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.measures import RequestRecord, Slo
from bench.openai_server import ServedModel
from bench.run_record import finite, measures_of, workload_facts
from bench.serve_cells import Cell
from bench.sim_spec import workload_json
from bench.versions import versions
from bench.workloads import BenchRequest

# Of what the client saves, one entry a request, in the order of the trace.
RAW = ("start_times", "ttfts", "itls", "latencies", "input_lens", "output_lens", "errors")


def request_records(
    requests: Sequence[BenchRequest], raw: Mapping[str, Any]
) -> list[RequestRecord]:
    """Requests that were answered; times count from when the client sent each, in seconds."""
    records = []
    for index, request in enumerate(requests):
        sent_s, first_s = raw["start_times"][index], raw["ttfts"][index]
        tokens = raw["output_lens"][index]
        if raw["errors"][index] or not tokens:
            continue
        first = sent_s + first_s
        gaps = raw["itls"][index]
        records.append(
            RequestRecord(
                request.request_id,
                sent_s,
                first,
                sent_s + raw["latencies"][index],
                raw["input_lens"][index],
                tokens,
                (first, *(first + np.cumsum(gaps)).tolist()),
            )
        )
    return records


def sent_late(requests: Sequence[BenchRequest], raw: Mapping[str, Any]) -> dict[str, float]:
    """How much later than the trace says the client sent requests, in seconds.

    Against the request that it sent most punctually. A client that cannot keep up shows here.
    """
    due = np.array([request.arrival_s for request in requests])
    late = np.array(raw["start_times"]) - due
    late -= late.min()
    return {"p50": float(np.median(late)), "p99": float(np.percentile(late, 99)), "max": late.max()}


def make_record(
    cell: Cell,
    label: str,
    key: str,
    server: ServedModel,
    slo: Slo,
    result: Mapping[str, Any],
    command: Sequence[str],
) -> dict[str, Any]:
    """A record with the fields of a simulated run's, and the client's raw arrays."""
    raw = {name: result[name] for name in RAW}
    record = {
        "key": key,
        "spec": {"policy": {"name": label}, "workload": workload_json(cell.workload)},
        "server": server.as_json(),
        "versions": versions(),
        "workload": workload_facts(cell.requests),
        "client": {
            "command": list(command),
            "sent_late_s": sent_late(cell.requests, raw),
            "num_other_length": _other_lengths(cell.requests, raw),
        },
        "raw": {
            "arrivals": [request.arrival_s for request in cell.requests],
            **{name: _rounded(values) for name, values in raw.items()},
        },
    }
    return judged(record, slo)


def judged(record: dict[str, Any], slo: Slo) -> dict[str, Any]:
    """The record with the measures of its raw arrays under `slo`."""
    raw = record["raw"]
    sent = [BenchRequest(f"req-{index}", at, 0, 0) for index, at in enumerate(raw["arrivals"])]
    measures = measures_of(request_records(sent, raw), len(sent), slo)
    if measures["num_requests"]:
        sent_per_s = len(sent) / measures["duration_s"]
        measures["met_per_s"] = measures["slo_attainment"] * sent_per_s
    spec = {**record["spec"], "slo": {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s}}
    judged: dict[str, Any] = finite({**record, "spec": spec, "measures": measures})
    return judged


def is_finished(record: Mapping[str, Any]) -> bool:
    """Whether every request was answered."""
    return not record["measures"]["num_unfinished"]


def append(path: Path, record: Mapping[str, Any]) -> None:
    """One line more in the file, whole or not at all as far as `load` is concerned."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(record, sort_keys=True) + "\n"
    torn = path.is_file() and path.read_bytes()[-1:] not in (b"", b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write(("\n" if torn else "") + line)


def load(path: Path) -> list[dict[str, Any]]:
    """Records of a file, the last one of each key; a line that was cut off is left out.

    Raises ValueError for a line that is something else.
    """
    records: dict[str, dict[str, Any]] = {}
    if not path.exists():
        return []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue  # an interrupted write
            if not isinstance(record, dict) or not {"key", "measures", "raw"} <= record.keys():
                raise ValueError(f"{path}:{number}: not the record of a served run")
            records[record["key"]] = record
    return list(records.values())


def _other_lengths(requests: Sequence[BenchRequest], raw: Mapping[str, Any]) -> int:
    return sum(
        not error and (prompt, output) != (request.prompt_tokens, request.output_tokens)
        for request, prompt, output, error in zip(
            requests, raw["input_lens"], raw["output_lens"], raw["errors"], strict=True
        )
    )


def _rounded(values: Any) -> Any:
    """To the microsecond: the clock is no better, and the file half as large."""
    if isinstance(values, list):
        return [_rounded(value) for value in values]
    return round(values, 6) if isinstance(values, float) else values
