"""`python -m bench compare`: records side by side, or policies run one after the other."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.cli_options import add_spec_arguments, make_spec, spec_fields
from bench.compare import by_workload, draw, label, load_results, rows, same_workload


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument(
        "records",
        nargs="*",
        type=Path,
        help="simulated (.json) and served (.jsonl) runs, or folders",
    )
    add_spec_arguments(parser)
    parser.add_argument("--policies", nargs="+", help="without records: run these now")
    parser.add_argument("--figure", type=Path, help="latencies against rate, or attainment bars")
    parser.add_argument("--rows", type=Path, help="with --policies: figure of the stages' rows")
    parser.add_argument("--seconds", type=float, default=2.0, help="virtual seconds in --rows")


def run(args: argparse.Namespace) -> int:
    """Print the table, draw the figures."""
    if bool(args.records) == bool(args.policies):
        raise ValueError("give either records or --policies")
    if args.rows is not None and not args.policies:
        raise ValueError("--rows needs --policies: records do not hold the stages' rows")
    results = _run_policies(args) if args.policies else load_results(args.records)
    served = any("raw" in result for result in results)
    for group in by_workload(results) if served else [results]:
        _print(group, served)
    if args.figure is not None:
        draw(args.figure, results)
    return 0


def _print(results: Sequence[Mapping[str, Any]], ratios: bool) -> None:
    table = Table(title=None if same_workload(results) else "Not the same requests in all columns!")
    table.add_column("measure")
    for result in results:
        table.add_column(label(result), justify="right")
    for name, values in rows(results, ratios):
        table.add_row(name, *values)
    Console().print(table)


def _run_policies(args: argparse.Namespace) -> list[dict[str, Any]]:
    from bench.sim_world import build_workload
    from bench.simulate import simulate

    fields = spec_fields(args)
    specs = [make_spec(fields, policy) for policy in args.policies]
    requests = build_workload(specs[0], args.data)
    outcomes = []
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("compare", total=len(specs))
        for spec in specs:
            outcomes.append(simulate(spec, requests=requests))
            bar.update(task, advance=1, description=spec.policy.name)
    if args.rows is not None:
        from bench.figures import stage_rows
        from bench.timeline import of_run

        stage_rows(args.rows, [of_run(outcome) for outcome in outcomes], args.seconds)
    return [outcome.result for outcome in outcomes]
