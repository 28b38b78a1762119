"""A timeline as a Chrome trace: open it in ui.perfetto.dev. A row a stage, a flow per request."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.timeline import Timeline

_PID = 1
_US = 1e6


def write_trace(path: Path, timeline: Timeline) -> None:
    """Write the trace, with flows where the timeline knows its requests."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        file.write(",\n".join(json.dumps(event) for event in events(timeline)))
        file.write("\n]}\n")


def events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """The trace's events, times in microseconds."""
    yield {"ph": "M", "pid": _PID, "name": "process_name", "args": {"name": "pipeline"}}
    for number, _ in enumerate(timeline.stages):
        name = {"name": f"stage {number}"}
        yield {"ph": "M", "pid": _PID, "tid": number, "name": "thread_name", "args": name}
        yield {
            "ph": "M",
            "pid": _PID,
            "tid": number,
            "name": "thread_sort_index",
            "args": {"sort_index": number},
        }
    yield from _work(timeline)
    yield from _flows(timeline)
    yield from _counters(timeline)


def _work(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for number, stage in enumerate(timeline.stages):
        for busy in stage:
            shape = timeline.shapes[busy.step]
            kind = "mixed" if shape.prefills and shape.decodes else ""
            kind = kind or ("prefill" if shape.prefills else "decode")
            yield {
                "ph": "X",
                "pid": _PID,
                "tid": number,
                "name": f"{kind} {shape.num_tokens}",
                "cat": kind,
                "ts": busy.start_s * _US,
                "dur": (busy.end_s - busy.start_s) * _US,
                "args": {
                    "step": busy.step,
                    "prefill_tokens": shape.prefill_tokens,
                    "prefills": len(shape.prefills),
                    "decodes": shape.decodes,
                    "decode_context": shape.decode_context,
                },
            }


def _flows(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """One arrow chain a request, from stage to stage and from step to step."""
    number_of = {step.step: index for index, step in enumerate(timeline.stages[0])}
    left = dict.fromkeys((r for rows in timeline.rows for r in rows), 0)
    for rows in timeline.rows:
        for request_id in rows:
            left[request_id] += 1
    seen: dict[str, int] = {}
    for step, rows in enumerate(timeline.rows):
        index = number_of.get(step)
        if index is None:
            continue
        for request_id in rows:
            seen[request_id] = seen.get(request_id, 0) + 1
            for number, stage in enumerate(timeline.stages):
                busy = stage[index]
                first = seen[request_id] == 1 and number == 0
                last = seen[request_id] == left[request_id] and number == len(timeline.stages) - 1
                yield {
                    "ph": "s" if first else "f" if last else "t",
                    **({"bp": "e"} if last else {}),
                    "pid": _PID,
                    "tid": number,
                    "id": request_id,
                    "name": request_id,
                    "cat": "request",
                    "ts": (busy.start_s + busy.end_s) / 2.0 * _US,
                }


def _counters(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for time_s, values in timeline.counters:
        yield {
            "ph": "C",
            "pid": _PID,
            "name": "requests",
            "ts": time_s * _US,
            "args": dict(values),
        }
