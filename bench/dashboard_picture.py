"""Draws the panels of a Grafana dashboard from a real Prometheus, where there is no Grafana.

`python -m bench.dashboard_picture http://localhost:9090 OUT.png --seconds 180`
"""

import argparse
import json
import math
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

DASHBOARD = Path(__file__).parent.parent / "configs" / "grafana_dashboard.json"
VARIABLES = {"$model_name": ".*", "$engine": ".*"}
COLUMNS = 3
Line = tuple[str, list[float], list[float]]


def query(expression: str, interval: str) -> str:
    """The expression as Grafana would send it with "All" chosen in every list."""
    for name, value in {**VARIABLES, "$__rate_interval": interval}.items():
        expression = expression.replace(name, value)
    return expression


def lines(
    prometheus: str, target: Mapping[str, str], start_s: float, end_s: float, interval: str
) -> Iterator[Line]:
    """(legend, seconds since the start, values) of one target. Raises OSError."""
    parameters = {
        "query": query(target["expr"], interval),
        "start": f"{start_s:.3f}",
        "end": f"{end_s:.3f}",
        "step": "2",
    }
    url = f"{prometheus.rstrip('/')}/api/v1/query_range?{urllib.parse.urlencode(parameters)}"
    with urllib.request.urlopen(url, timeout=30) as answer:
        series = json.load(answer)["data"]["result"]
    for one in series:
        points = [(float(at), float(value)) for at, value in one["values"]]
        points = [(at - start_s, value) for at, value in points if math.isfinite(value)]
        if points:
            name = legend(target["legendFormat"], one["metric"])
            yield name, [at for at, _ in points], [value for _, value in points]


def legend(form: str, labels: Mapping[str, str]) -> str:
    """Grafana's legend: `{{label}}` filled in."""
    for name in ("cause", "cohort", "engine", "kind", "reason"):
        form = form.replace(f"{{{{{name}}}}}", labels.get(name, ""))
    return form.strip()


def draw(prometheus: str, out: Path, seconds: float, interval: str) -> dict[str, int]:
    """Draw all panels of the last `seconds`; the number of lines in each."""
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    end_s = time.time()
    counts: dict[str, int] = {}
    figure, axes = pyplot.subplots(
        math.ceil(len(panels) / COLUMNS), COLUMNS, figsize=(18, 2.9 * len(panels) / COLUMNS)
    )
    for axis, panel in zip(axes.flat, panels, strict=False):
        found = [
            line
            for target in panel["targets"]
            for line in lines(prometheus, target, end_s - seconds, end_s, interval)
        ]
        counts[panel["title"]] = len(found)
        _draw_panel(axis, panel, found)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(out, dpi=70)
    pyplot.close(figure)
    return counts


def _draw_panel(axis: Any, panel: Mapping[str, Any], found: list[Line]) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    for name, times, values in found:
        axis.plot(times, values, label=name, linewidth=1.2)
    axis.set_title(panel["title"], loc="left", fontsize=10)
    axis.set_ylim(bottom=0)
    unit = {"s": "s", "percentunit": "share", "ops": "1/s"}.get(defaults["unit"], "")
    axis.set_ylabel(unit, fontsize=8)
    axis.tick_params(labelsize=8)
    if found:
        axis.legend(fontsize=7, frameon=False, loc="best")


def main() -> None:
    """Draw, and say how many lines each panel has."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prometheus", help="address of a Prometheus that scrapes the server")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--interval", default="20s", help="for $__rate_interval")
    args = parser.parse_args()
    for title, count in draw(args.prometheus, args.out, args.seconds, args.interval).items():
        print(f"{count:3} lines  {title}")


if __name__ == "__main__":
    main()
