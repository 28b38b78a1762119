"""`python -m bench sweep PRESET`: policies x workloads x rates, on all cores or on Ray."""

import argparse
import shlex
from pathlib import Path

from bench.cli_options import add_spec_arguments, spec_fields
from bench.cli_progress import track
from bench.parallel import run_all
from bench.sim_spec import profile_of
from bench.sweep import Sweep, load_sweep, make_sweep, markdown_table, report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("sweep", nargs="?", help="preset under configs/sweeps, or a YAML file")
    add_spec_arguments(parser)
    parser.add_argument("--policies", nargs="+", help="without a preset: policies to run")
    parser.add_argument("--rates", nargs="+", type=float, help="without a preset: requests/s")
    parser.add_argument("--no-files", action="store_true", help="length models, not trace files")
    parser.add_argument("--out", type=Path, default=Path("out/sweep"), help="run records")
    parser.add_argument("--workers", type=int, help="processes (default: all cores)")
    parser.add_argument(
        "--ray",
        nargs="?",
        const="auto",
        metavar="ADDRESS",
        help="run on a Ray cluster instead ('local' starts one here)",
    )
    parser.add_argument("--table", type=Path, help="write a Markdown page")
    parser.add_argument("--figure", type=Path, help="latencies and attainment against rate")


def run(args: argparse.Namespace) -> int:
    """Run what is not there yet, print the table."""
    sweep = _sweep(args)
    specs = [case.spec for case in sweep.cases]
    with track("sweep", len(specs)) as done:
        results = run_all(
            specs,
            args.out,
            data=args.data,
            workers=args.workers,
            ray_address=args.ray,
            done=done,
        )
    print(markdown_table(sweep.cases, results))
    if args.table is not None:
        page = report(sweep, results, _command(args), source=profile_of(specs[0].profile).source)
        args.table.parent.mkdir(parents=True, exist_ok=True)
        args.table.write_text(page, encoding="utf-8")
    if args.figure is not None:
        from bench.figures import latency_against_rate

        latency_against_rate(args.figure, results, lambda r: str(r["spec"]["policy"]["name"]))
    return 0


def _sweep(args: argparse.Namespace) -> Sweep:
    if args.sweep is not None:
        return load_sweep(args.sweep, files=not args.no_files)
    if not args.policies:
        raise ValueError("give a preset, or --policies and --workload")
    fields = spec_fields(args)
    workload = fields.pop("workload")
    entry = {"label": workload["name"], "workload": workload}
    plain = {"base": fields, "policies": args.policies, "workloads": [entry], "rates": args.rates}
    return make_sweep(plain, files=not args.no_files)


def _command(args: argparse.Namespace) -> str:
    """The command without this machine's folders."""
    words = ["python", "-m", "bench", "sweep", args.sweep or ""]
    if args.data is not None:
        words += ["--data", "DIR"]
    if args.no_files:
        words.append("--no-files")
    return shlex.join([*words, "--table", args.table.as_posix()])
