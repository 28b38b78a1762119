"""How the time of a stage depends on what the GPU did before: `... stage_report ALONE LOAD CLOCKS`.

ALONE and LOAD are `stages-N.json` of `pp_serving` (entries with `events: true`), CLOCKS the log of
`nvidia-smi --query-gpu=timestamp,index,clocks.sm,power.draw,temperature.gpu`; all may be gzipped.
"""

import argparse
import csv
import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TextIO

PLACES = ((1, "first"), (2, "second"), (3, "third"), (4, "4th to 14th"), (15, "15th and later"))


def opened(path: Path) -> TextIO:
    """A text file, gzipped or not."""
    opener: Any = gzip.open if path.suffix == ".gz" else open
    file: TextIO = opener(path, "rt", encoding="utf-8")
    return file


def stages_of(path: Path) -> list[list[list[float]]]:
    """Rows of every stage: tokens, requests, start, forward and sampling seconds."""
    with opened(path) as file:
        stages: list[list[list[float]]] = json.load(file)["stages"]
    return stages


def by_place(rows: Sequence[Sequence[float]], tokens: int) -> dict[str, list[float]]:
    """Forward seconds of micro-batches of `tokens` by their place among such in a row."""
    found: dict[str, list[float]] = defaultdict(list)
    place = 0
    for row in rows:
        place = place + 1 if row[0] == tokens else 0
        if place:
            word = [word for low, word in PLACES if place >= low][-1]
            found[word].append(row[3])
    return found


def clock_lines(path: Path) -> Iterator[str]:
    """Median SM clock by what the GPU drew."""
    clocks: dict[int, list[float]] = defaultdict(list)
    with opened(path) as file:
        for line in csv.reader(file):
            if len(line) == 5:
                watts = float(line[3].split()[0])
                clocks[int(watts // 200) * 200].append(float(line[2].split()[0]))
    for low, values in sorted(clocks.items()):
        yield f"| {low} to {low + 200} | {len(values)} | {median(values):.0f} |"


def main() -> int:
    """Print three Markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("alone", "load", "clocks"):
        parser.add_argument(name, type=Path)
    files = parser.parse_args()
    alone, load, clocks = files.alone, files.load, files.clocks
    print("| stage | tokens, alone in the pipeline | times | forward, ms |\n|---|---|---|---|")
    for stage, rows in enumerate(stages_of(alone)):
        for tokens in dict.fromkeys(row[0] for row in rows):
            own = [row[3] for row in rows if row[0] == tokens]
            print(f"| {stage} | {tokens:.0f} | {len(own)} | {1e3 * median(own):.2f} |")
    tokens = max(row[0] for row in stages_of(load)[0])
    print(f"\n| stage | place of {tokens:.0f} tokens among such in a row | times | forward, ms |")
    print("|---|---|---|---|")
    for stage, rows in enumerate(stages_of(load)):
        for word, own in by_place(rows, int(tokens)).items():
            print(f"| {stage} | {word} | {len(own)} | {1e3 * median(own):.2f} |")
    print("\n| W drawn by the GPU | samples | median SM clock, MHz |\n|---|---|---|")
    print("\n".join(clock_lines(clocks)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
