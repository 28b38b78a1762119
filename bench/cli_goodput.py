"""`python -m bench goodput`: the highest request rate at which a policy keeps the SLO."""

import argparse
import json
import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from bench.cli_options import add_spec_arguments, make_spec, spec_fields
from bench.goodput_search import RULES, Bounds, Goodput, search, shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_spec_arguments(parser)
    parser.add_argument("--policies", nargs="+", required=True)
    parser.add_argument("--low", type=float, default=1.0, help="lowest rate, req/s (default 1)")
    parser.add_argument("--high", type=float, default=32.0, help="highest rate (default 32)")
    parser.add_argument("--tolerance", type=float, default=0.5, help="req/s (default 0.5)")
    parser.add_argument("--duration", type=float, default=60.0, help="seconds a run sends for")
    parser.add_argument("--workers", type=int, help="processes (default: all cores)")
    parser.add_argument("--out", type=Path, help="write the rates as JSON")


def run(args: argparse.Namespace) -> int:
    """Search for each policy in a process of its own, print a table."""
    fields = spec_fields(args)
    bounds = Bounds(args.low, args.high, args.tolerance, args.duration)
    for policy in args.policies:
        make_spec(fields, policy)  # wrong words are told before anything runs
    found: dict[str, Goodput] = {}
    count = min(args.workers or os.cpu_count() or 1, len(args.policies))
    with (
        Progress(console=Console(stderr=True), transient=True) as bar,
        ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool,
    ):
        task = bar.add_task("goodput", total=len(args.policies))
        futures = {pool.submit(search, p, fields, bounds, args.data): p for p in args.policies}
        for future in as_completed(futures):
            found[futures[future]] = future.result()
            bar.update(task, advance=1)
    print(f"goodput on {fields['workload']['name']}, req/s, {bounds.duration_s:g} s a run")
    width = max(map(len, args.policies))
    print(" " * width + "".join(f"  {rule:>22}" for rule in RULES))
    for policy in args.policies:
        cells = "".join(f"  {shown(found[policy].rates[rule], bounds):>22}" for rule in RULES)
        print(f"{policy:<{width}}{cells}")
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        rows = [asdict(found[policy]) for policy in args.policies]
        args.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0
