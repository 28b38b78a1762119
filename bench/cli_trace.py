"""`python -m bench trace`: a server's step log as a Chrome trace and as a picture of the stages."""

import argparse
from pathlib import Path

from bench.chrome_trace import write_trace
from bench.step_log import read_step_log, timeline_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("file", type=Path, help="the file that PPBALANCE_TRACE named")
    parser.add_argument("--out", type=Path, help="trace for ui.perfetto.dev (default: FILE.json)")
    parser.add_argument("--figure", type=Path, help="picture of the stages' rows, bubbles white")
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds in --figure")
    parser.add_argument("--at", type=float, help="its middle, seconds from the log's start")


def run(args: argparse.Namespace) -> int:
    """Convert and draw."""
    log = read_step_log(args.file)
    timeline = timeline_of(log, args.file.name)
    out = args.out or args.file.with_name(f"{args.file.name}.json")
    write_trace(out, timeline)
    print(f"written: {out} ({len(log.batches)} micro-batches; open it in ui.perfetto.dev)")
    if args.figure is not None:
        from bench.figures import stage_rows

        stage_rows(args.figure, [timeline], args.seconds, args.at)
        print(f"written: {args.figure}")
    return 0
