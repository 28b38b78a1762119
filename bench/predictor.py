"""How well the plugin's cost model predicts measured stage times: `python -m bench.predictor DIR`.

DIR holds `h200_stage`, `h200x2_pp2` and `azure`. Writes Markdown tables of absolute percentage
errors.
"""

import argparse
import sys
import timeit
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.fit_rows import MeasuredShape, load_rows
from bench.logged_runs import LoggedStep, load_lengths, load_runs, logged_steps
from bench.versions import versions
from vllm_ppbalance.base_table import BaseTable
from vllm_ppbalance.cost_model import CostModel
from vllm_ppbalance.features import UNITS
from vllm_ppbalance.profile_fit import TERMS, Measured, fit_cost_model
from vllm_ppbalance.roofline import roofline

SKIP_STEPS = 200  # of each run, before errors count
STAGE_LAYERS = 32  # of the logged runs; the rows were measured with half of them
HOST_S = 0.002  # host work in a measured row that a running pipeline hides
PART_TRUST = 0.5  # of a stage time that is not the gap between two completions
# Reached by the rows of an H200 (dense bf16, HBM3e): 70 % and 83 % of the data sheet.
FLOPS, BYTES_PER_S = 0.7e15, 4.0e12
ABLATION: tuple[tuple[str, Collection[str]], ...] = (
    ("base only", ("base",)),
    ("+ prefix", ("base", "prefix")),
    ("+ prefill square", ("base", "prefix", "square")),
    ("+ decode context", ("base", "prefix", "square", "context")),
    ("+ bias", ("base", "prefix", "square", "context", "bias")),
    ("+ decodes, prefill or not, past: all", tuple(UNITS)),
)

Errors = Sequence[float]

_TEXT = """Written by `python -m bench.predictor DIR --out FILE`. Absolute errors in percent of what
was measured.

One stage: shapes timed alone on an H200, fitted on a random third of them and tested on the rest,
{seeds} thirds of each file; a shape's time is the median of its repeats. Online: real serving runs
on two H200, each with a fresh model that predicts every full step, then learns it; the first
{skipped} steps of a run do not count. The logs hold token and decode counts only: prefixes and
contexts are replayed from the workload. A step is full while other batches are in flight before and
after it.

Terms are those of `vllm_ppbalance/features.py`; a fit to rows has no bias, as its table holds a
constant already.

Versions: {made}.
"""


def percent_error(predicted: float, measured: float) -> float:
    """Absolute, of what was measured."""
    return abs(predicted / measured - 1.0) * 100.0


def to_points(shapes: Sequence[MeasuredShape]) -> list[Measured]:
    """A point for every repeat of every shape."""
    return [
        Measured(s.shape.num_tokens, s.shape.prefills, s.shape.decodes, s.shape.decode_context, t)
        for s in shapes
        for t in s.seconds
    ]


def heldout(shapes: Sequence[MeasuredShape], seed: int, terms: Collection[str]) -> list[float]:
    """Errors on two random thirds of the shapes of a model fitted on the other third."""
    order = np.random.RandomState(seed).permutation(len(shapes)).tolist()
    third = len(shapes) // 3
    model = fit_cost_model(to_points([shapes[i] for i in order[:third]]), terms)
    errors = []
    for shape in (shapes[i] for i in order[third:]):
        point = to_points([shape])[0]
        # As in the fit: one-time work in some of the repeats is not the stage's time.
        errors.append(percent_error(model.predict(*point[:4]), float(np.median(shape.seconds))))
    return errors


def online(
    steps: Sequence[LoggedStep], model: CostModel, learn: bool = True
) -> list[tuple[LoggedStep, float]]:
    """Each full step after the first ones with its error, predicted before it is learnt."""
    found = []
    for index, step in enumerate(steps):
        if not step.full:
            continue
        shape, seconds = step.measured[:4], step.measured.seconds
        if index >= SKIP_STEPS:
            found.append((step, percent_error(model.predict(*shape), seconds)))
        if learn:
            model.observe(*shape, seconds, 1.0 if step.by_gap else PART_TRUST)
    return found


def pipeline_points(shapes: Sequence[MeasuredShape], layers: int) -> list[Measured]:
    """The rows as a stage of the logged runs would show them."""
    times = STAGE_LAYERS / layers
    return [p._replace(seconds=(p.seconds - HOST_S) * times) for p in to_points(shapes)]


def guessed_model(meta: dict[str, Any]) -> CostModel:
    """The roofline of a stage of the logged runs."""
    hidden, heads, kv_heads = int(meta["hidden"]), int(meta["heads"]), int(meta["kv_heads"])
    kv_hidden = kv_heads * hidden // heads
    layer = hidden * (2 * hidden + 2 * kv_hidden) + 3 * hidden * int(meta["intermediate"])
    return roofline(
        layer * STAGE_LAYERS,
        FLOPS,
        BYTES_PER_S,
        kv_bytes_per_token=2 * 2 * kv_hidden * STAGE_LAYERS,
        attention_flops_per_pair=4 * hidden * STAGE_LAYERS,
    )


def _row(name: str, errors: Errors) -> str:
    values = np.array(errors if len(errors) else [np.nan])
    numbers = (np.median(values), values.mean(), np.percentile(values, 90))
    return f"| {name} | {len(errors)} | " + " | ".join(f"{n:.2f}" for n in numbers) + " |"


def _head(name: str) -> str:
    return f"\n| {name} | predictions | median % | mean % | P90 % |\n|---|---|---|---|---|"


def report_rows(folder: Path, seeds: int) -> Iterator[str]:
    """Lines: held-out errors on each file of single-stage rows, and what each term is worth."""
    files = {path.stem: load_rows(path)[1] for path in sorted(folder.glob("*.jsonl"))}
    yield _head("one stage, trained on a third of the shapes")
    for name, shapes in files.items():
        yield _row(name, [e for s in range(seeds) for e in heldout(shapes, s, TERMS)])
    yield _head("terms, graph-mode files")
    graph = [shapes for name, shapes in files.items() if not name.endswith("eager")]
    for name, terms in ABLATION:
        yield _row(
            name, [e for shapes in graph for s in range(seeds) for e in heldout(shapes, s, terms)]
        )


def report_logs(folder: Path, rows: Path, trace: Path) -> Iterator[str]:
    """Lines: errors online, each run with a fresh model; by start, kind of step, and terms."""
    meta, shapes = load_rows(rows)
    points, lengths = pipeline_points(shapes, int(meta["layers"])), load_lengths(trace)
    runs = {run["name"]: logged_steps(folder, run, lengths) for run in load_runs(folder)}
    saved = fit_cost_model(points).to_dict()

    def errors(
        make: Callable[[], CostModel], learn: bool = True
    ) -> dict[str, list[tuple[LoggedStep, float]]]:
        return {name: online(steps, make(), learn) for name, (steps, _) in runs.items()}

    profiled = errors(lambda: CostModel.from_dict(saved))
    yield _head(f"online, full steps after the first {SKIP_STEPS}, start from rows of one stage")
    for name, found in profiled.items():
        replayed = runs[name][1]
        note = f" (context guessed: {replayed} steps replayed otherwise)" if replayed else ""
        yield _row(name + note, [e for _, e in found])
    yield _head("online, all runs")
    for name, by_run in (
        ("start from rows", profiled),
        ("rows only, nothing learnt", errors(lambda: CostModel.from_dict(saved), learn=False)),
        ("start from the roofline", errors(lambda: guessed_model(meta))),
    ):
        every = [pair for found in by_run.values() for pair in found]
        yield _row(name, [e for _, e in every])
        yield _row(f"{name}: steps with prefill", [e for s, e in every if s.measured.prefills])
        yield _row(f"{name}: time is the completion gap", [e for s, e in every if s.by_gap])
    yield _head("terms learnt, online, start from the rows' base")
    for name, learn in ABLATION:
        tables = errors(lambda learn=learn: _base_model(saved, learn))  # type: ignore[misc]
        yield _row(name, [e for found in tables.values() for _, e in found])


def _base_model(saved: dict[str, Any], learn: Collection[str]) -> CostModel:
    """A saved model's base without its terms."""
    table = BaseTable(saved["tokens"], saved["seconds"], saved["tile"], saved["tile_s"])
    return CostModel(table, profiled=True, learn=learn)


def speed(points: Sequence[Measured], rounds: int = 300) -> tuple[float, float]:
    """Seconds of a prediction and of an update: the fastest of many short rounds over `points`."""
    model = fit_cost_model(points)
    taken = [points[i] for i in np.linspace(0, len(points) - 1, 50).astype(int)]

    def predict() -> None:
        for p in taken:
            model.predict(p.num_tokens, p.prefills, p.decodes, p.decode_context)

    def update() -> None:
        for p in taken:
            model.observe(p.num_tokens, p.prefills, p.decodes, p.decode_context, p.seconds)

    fastest = [min(timeit.repeat(call, number=1, repeat=rounds)) for call in (predict, update)]
    return fastest[0] / len(taken), fastest[1] / len(taken)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit status 2 where the data is not there."""
    parser = argparse.ArgumentParser(prog="python -m bench.predictor", description=__doc__)
    parser.add_argument("data", type=Path, help="folder with h200_stage, h200x2_pp2, azure")
    parser.add_argument("--out", type=Path, help="Markdown file to write besides")
    parser.add_argument("--seeds", type=int, default=5, help="random thirds of each file")
    args = parser.parse_args(argv)
    rows = args.data / "h200_stage" / "qwen2.5-32b_16layers_middle.jsonl"
    trace = args.data / "azure" / "AzureLLMInferenceTrace_conv.csv"
    missing = [path for path in (rows, trace, args.data / "h200x2_pp2") if not path.exists()]
    if missing:
        print(f"not there: {', '.join(map(str, missing))}", file=sys.stderr)
        return 2
    predict_s, update_s = speed(to_points(load_rows(rows)[1]))
    made = ", ".join(f"{name} {version}" for name, version in versions().items())
    lines = [
        _TEXT.format(seeds=args.seeds, skipped=SKIP_STEPS, made=made),
        f"A prediction takes {predict_s * 1e6:.1f} us, an update {update_s * 1e6:.1f} us "
        "(fastest of many short rounds, one thread).",
        *report_rows(rows.parent, args.seeds),
        *report_logs(args.data / "h200x2_pp2", rows, trace),
    ]
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
