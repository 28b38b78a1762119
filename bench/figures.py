"""Figures with matplotlib: what each stage did, latencies against rate, SLO attainment."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

from bench.timeline import Timeline

matplotlib.use("Agg")  # files only: no display is asked for
from matplotlib import pyplot

_COLOURS = {"prefill": "#d1495b", "mixed": "#edae49", "decode": "#30638e"}
_LATENCIES = (("ttft_s", "P90 TTFT, s"), ("tpot_s", "P90 TPOT, s"))


def stage_rows(
    path: Path,
    timelines: Sequence[Timeline],
    seconds: float = 2.0,
    middle_s: float | None = None,
) -> None:
    """A row a stage and a panel a run: what is white within a row is a bubble.

    The panels show the same `seconds`, around `middle_s` or the first one's middle.
    """
    start_s = (timelines[0].middle_s if middle_s is None else middle_s) - seconds / 2.0
    figure, axes = pyplot.subplots(
        len(timelines), 1, figsize=(12, 1.2 + 1.8 * len(timelines)), sharex=True, squeeze=False
    )
    for axis, timeline in zip(axes[:, 0], timelines, strict=True):
        _draw_rows(axis, timeline, start_s, start_s + seconds)
    for kind, colour in _COLOURS.items():
        axes[0, 0].barh([0], [0], color=colour, label=kind)
    axes[0, 0].legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, frameon=False)
    axes[-1, 0].set_xlabel("time, s")
    _save(figure, path)


def _draw_rows(axis: Any, timeline: Timeline, start_s: float, end_s: float) -> None:
    for number, stage in enumerate(timeline.stages):
        for kind, colour in _COLOURS.items():
            spans = [
                (busy.start_s, busy.end_s - busy.start_s)
                for busy in stage
                if busy.end_s > start_s
                and busy.start_s < end_s
                and _kind(timeline.shapes[busy.step]) == kind
            ]
            axis.broken_barh(spans, (number - 0.42, 0.84), color=colour, linewidth=0)
    axis.set_title(f"{timeline.title}: bubble ratio {timeline.bubble_ratio:.2f}", loc="left")
    axis.set_yticks(range(len(timeline.stages)), [f"GPU {n}" for n in range(len(timeline.stages))])
    axis.invert_yaxis()
    axis.set_xlim(start_s, end_s)


def _kind(shape: Any) -> str:
    if not shape.prefills:
        return "decode"
    return "mixed" if shape.decodes else "prefill"


def latency_against_rate(
    path: Path, results: Sequence[Mapping[str, Any]], label: Callable[[Mapping[str, Any]], str]
) -> None:
    """P90 TTFT, P90 TPOT and joint SLO attainment against the rate that was sent, a line a label.

    `results` are run records as `simulate` writes them.
    """
    lines: dict[str, list[tuple[float, Mapping[str, Any]]]] = {}
    for result in results:
        lines.setdefault(label(result), []).append((sent_rate(result), result["measures"]))
    figure, axes = pyplot.subplots(1, 3, figsize=(14, 4))
    for name, points in sorted(lines.items()):
        points.sort(key=lambda point: point[0])
        rates = [rate for rate, _ in points]
        for axis, (measure, _) in zip(axes, _LATENCIES, strict=False):
            axis.plot(rates, [m[measure]["p90"] for _, m in points], marker="o", label=name)
        axes[2].plot(rates, [m["slo_attainment"] for _, m in points], marker="o", label=name)
    slo = results[0]["spec"]["slo"]
    for axis, (measure, title) in zip(axes, _LATENCIES, strict=False):
        axis.axhline(slo[measure], color="grey", linestyle=":")
        axis.set_yscale("log")
        axis.set_ylabel(title)
    axes[2].set_ylabel("SLO attainment")
    axes[2].set_ylim(0.0, 1.02)
    for axis in axes:
        axis.set_xlabel("requests/s")
    axes[2].legend(frameon=False, fontsize="small")
    _save(figure, path)


def attainment_bars(
    path: Path, results: Sequence[Mapping[str, Any]], label: Callable[[Mapping[str, Any]], str]
) -> None:
    """SLO attainment of each result as a bar."""
    figure, axis = pyplot.subplots(figsize=(8, 0.8 + 0.35 * len(results)))
    names = [label(result) for result in results]
    values = [result["measures"]["slo_attainment"] for result in results]
    bars = axis.barh(range(len(results)), values, color=_COLOURS["decode"])
    axis.bar_label(bars, fmt="%.3f", padding=3)
    axis.set_yticks(range(len(results)), names)
    axis.invert_yaxis()
    axis.set_xlim(0.0, 1.1)
    axis.set_xlabel("SLO attainment")
    _save(figure, path)


def sent_rate(result: Mapping[str, Any]) -> float:
    """Requests a second that the workload sent."""
    return float(result["workload"]["num_requests"] / result["workload"]["span_s"])


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
