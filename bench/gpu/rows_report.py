"""One stage's time by prompt tokens, on a cold GPU and under load: `... rows_report FOLDER`.

FOLDER is what `pp_serving` left of `configs/gpu/stage_rows_h200.yaml`, its stages gzipped or not:
each size alone after a pause, and many of that size in a row, of which the first WARM_S are left
out. Beside them what the latency profile says of a stage of as many layers.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from bench.batch import BatchShape
from bench.gpu.stage_report import stages_of
from bench.sim_spec import profile_of

PROFILE, LAYERS = "h200_qwen2.5-32b", 16
WARM_S = 0.4

Times = dict[int, list[float]]


def rows_of(folder: Path) -> tuple[Times, Times]:
    """Forward seconds by tokens: cold and hot."""
    cold, hot = defaultdict(list), defaultdict(list)
    runs = json.loads((folder / "results.json").read_text(encoding="utf-8"))["runs"]
    for number, run in enumerate(runs):
        if not run.get("events"):
            continue
        path = folder / f"stages-{number}.json"
        stage = stages_of(path if path.exists() else path.with_suffix(".json.gz"))[0]
        for tokens, _, start_s, forward_s, _ in stage:
            if not run.get("queued"):
                cold[int(tokens)].append(forward_s)
            elif tokens == run["stock"] and start_s > WARM_S:
                hot[int(tokens)].append(forward_s)
    return dict(cold), dict(hot)


def table(cold: Times, hot: Times) -> Iterator[str]:
    """Markdown."""
    profile = profile_of(PROFILE).compiled
    yield "| tokens | cold, ms | least to most | in a row, ms | in a row / cold | profile, ms |"
    yield "|---:|---:|---:|---:|---:|---:|"
    for tokens in sorted(cold.keys() & hot.keys()):
        alone, many = cold[tokens], median(hot[tokens])
        known = profile(BatchShape(((tokens, 0),)), LAYERS, True, False)
        yield (
            f"| {tokens} | {1e3 * median(alone):.2f} | {1e3 * min(alone):.2f} to "
            f"{1e3 * max(alone):.2f} | {1e3 * many:.2f} | {many / median(alone):.2f} "
            f"| {1e3 * known:.2f} |"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    print("\n".join(table(*rows_of(parser.parse_args().folder))))
