"""The plugin's cost model on a GPU: `python -m bench.gpu.predictor_check FOLDER --rows ROWS`.

FOLDER is what `bench/gpu/one_gpu.sh` left, ROWS the step times of single stages (`h200_stage`).
Markdown tables of absolute errors in percent: profiles of `python -m vllm_ppbalance profile` on
rows measured by another program, and each micro-batch of a served minute before it was learnt.
"""

import argparse
import gzip
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from bench.fit_rows import MeasuredShape, load_rows
from bench.predictor import HOST_S, percent_error
from bench.step_log import LoggedMicroBatch, read_step_log
from vllm_ppbalance.cost_model import CostModel

PROFILES = (
    ("32b", "qwen2.5-32b_16layers_middle", "32B, 16 layers, CUDA graphs"),
    ("32b_eager", "qwen2.5-32b_16layers_middle_eager", "32B, 16 layers, no graphs"),
    ("14b", "qwen2.5-14b_12layers_middle", "14B, 12 layers, CUDA graphs"),
)
SMALL = 512  # tokens; fewer may take the host longer than the GPU
FEW = f"prompts of fewer than {SMALL} tokens"
KINDS = ("prompts", "prompts and decodes", "decodes")
WARM_S = 5.0  # of the served minute, not counted
HEAD = "| predictions | number | median % | mean % | P90 % |\n|---|---:|---:|---:|---:|"


def row(name: str, errors: Sequence[float]) -> str:
    """Of one table; errors in percent."""
    if not errors:
        return f"| {name} | 0 | | | |"
    values = np.array(errors)
    numbers = (np.median(values), values.mean(), np.percentile(values, 90))
    return f"| {name} | {len(values)} | " + " | ".join(f"{x:.1f}" for x in numbers) + " |"


def saved_model(folder: Path) -> CostModel:
    """The profile in a folder. Raises FileNotFoundError where there is none."""
    found = sorted(path for path in folder.glob("*.json") if path.name != "results.json")
    if not found:
        raise FileNotFoundError(f"{folder}: no profile")
    return CostModel.from_dict(json.loads(found[-1].read_text(encoding="utf-8"))["model"])


def on_rows(model: CostModel, shapes: Sequence[MeasuredShape]) -> Iterator[tuple[str, float]]:
    """(kind, error) of each shape; the host's part of a row is taken off."""
    for measured in shapes:
        shape = measured.shape
        kind = KINDS[bool(shape.decodes) + (not shape.prefills)]
        if not shape.decodes and shape.num_tokens < SMALL:
            kind = FEW
        predicted = model.predict(
            shape.num_tokens, shape.prefills, shape.decodes, shape.decode_context
        )
        yield kind, percent_error(predicted, float(np.median(measured.seconds)) - HOST_S)


def profile_lines(folder: Path, rows: Path) -> Iterator[str]:
    """Every profile against the rows of the same stage."""
    yield HEAD
    for name, file, words in PROFILES:
        found = list(on_rows(saved_model(folder / name), load_rows(rows / f"{file}.jsonl")[1]))
        for kind in (*KINDS, FEW):
            yield row(f"{words}: {kind}", [error for word, error in found if word == kind])


def served(path: Path) -> list[LoggedMicroBatch]:
    """The micro-batches of a step log, gzipped or not, whose stage time was measured."""
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "log.jsonl"
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rb") as source, plain.open("wb") as target:
            shutil.copyfileobj(source, target)
        batches = read_step_log(plain).batches
    start = batches[0].done_s + WARM_S
    return [b for b in batches if b.clear and b.predicted_s is not None and b.done_s > start]


def online_lines(path: Path) -> Iterator[str]:
    """A served minute: predicted before it was learnt."""
    batches = served(path)
    span_s = batches[-1].done_s - batches[0].done_s
    yield f"\nServed for {span_s:.0f} s:\n"
    yield HEAD
    kinds = {
        "all": batches,
        "with prompts": [b for b in batches if b.prefills],
        "decodes only": [b for b in batches if not b.prefills],
    }
    for name, own in kinds.items():
        yield row(name, [percent_error(b.predicted_s or 0.0, b.stage_s) for b in own])


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=Path, required=True)
    args = parser.parse_args(argv)
    for line in profile_lines(args.folder, args.rows):
        print(line)
    for line in online_lines(args.folder / "stage" / "online.jsonl.gz"):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
