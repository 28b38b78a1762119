"""`python -m bench serve`: a running server under vLLM's own load generator.

Sends traces at their own times, or lengths at fixed rates, through `vllm bench serve`. Results are
kept one JSON line a run; the same command goes on where it was interrupted.
"""

import argparse
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.cli_options import (
    add_data_argument,
    add_request_arguments,
    add_slo_arguments,
    request_fields,
    slo_fields,
)
from bench.compare import draw
from bench.openai_server import look_at
from bench.serve_cells import Cell, fitting, make_cells, parse_rates
from bench.serve_run import ServeRun, Watch, serve_cells
from bench.served_table import goodputs, print_table
from bench.sim_spec import parse_slo

LATE_S = 0.05  # P99 of how late the client may send before it is told


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--base-url", required=True, help="server, as http://localhost:8000")
    parser.add_argument("--label", required=True, help="names the server with all its settings")
    parser.add_argument("--model", help="served model (default: the server's first)")
    parser.add_argument("--tokenizer", help="draw token ids from this one (default: bytes only)")
    add_data_argument(parser)
    parser.add_argument(
        "--workload",
        nargs="+",
        required=True,
        metavar="NAME[=FILE]",
        help="one or more, as azure_conv=FILE.csv cnn random",
    )
    add_request_arguments(parser)
    parser.add_argument(
        "--window-minutes", nargs=2, type=float, metavar=("START", "END"), help="as --window"
    )
    parser.add_argument(
        "--request-rate-range", metavar="START,STOP,STEP", help="1,11,1 runs rates 1 to 10"
    )
    parser.add_argument(
        "--duration",
        type=float,
        default=60.0,
        help="of drawn arrivals, seconds (default 60)",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="a run each (default 0)")
    parser.add_argument("--warmup", type=int, default=8, help="requests beforehand (default 8)")
    parser.add_argument("--skip-long", action="store_true", help="leave out what does not fit")
    parser.add_argument(
        "--drain-limit", type=float, default=1800.0, help="seconds after the last request"
    )
    add_slo_arguments(parser)
    parser.add_argument("--out", type=Path, help="JSON lines (default: out/serve/LABEL.jsonl)")
    parser.add_argument("--figure", type=Path, help="latencies and attainment against rate")


def run(args: argparse.Namespace) -> int:
    """Send what is not there yet, print a table; 130 if interrupted, 1 if not all was answered."""
    console = Console(stderr=True)
    settings, cells = _plan(args)
    results: list[dict[str, Any]] = []
    try:
        with _ends_by_exception(), _progress(console, cells) as watch:
            for cell, record in serve_cells(settings, cells, watch):
                results.append(record)
                watch.answered(cell, record["measures"]["num_requests"])
                for line in _complaints(cell, record):
                    watch.say(line)
    except KeyboardInterrupt:
        console.print(f"Interrupted: {len(results)} of {len(cells)} runs are in {settings.out}")
        return 130
    print_table(results)
    for line in goodputs(results):
        print(line)
    print(f"written: {settings.out}")
    if args.figure is not None:
        draw(args.figure, results)
    return 1 if any(record["measures"]["num_unfinished"] for record in results) else 0


def _plan(args: argparse.Namespace) -> tuple[ServeRun, list[Cell]]:
    """What to send to which server. Raises ValueError for a wrong argument."""
    for option, least in (("duration", 1e-3), ("warmup", 0), ("drain_limit", 0), ("seeds", 0)):
        value = getattr(args, option)
        for number in value if isinstance(value, list) else [value]:
            if not number >= least:
                name = option.replace("_", "-")
                raise ValueError(f"--{name} {number}: must be at least {least:g}")
    if not args.label.strip() or "/" in args.label:
        raise ValueError(f"--label {args.label!r}: must be a word that can name a file")
    slo = parse_slo(slo_fields(args))
    fields, rates = _request_fields(args), []
    if args.request_rate_range is not None:
        if args.rate is not None:
            raise ValueError("give either --rate or --request-rate-range")
        rates = parse_rates(args.request_rate_range)
    cells = make_cells(args.workload, fields, rates, args.seeds, args.duration, args.data)
    server = look_at(args.base_url, args.model)
    run = ServeRun(
        server,
        args.label,
        args.out or Path("out") / "serve" / f"{args.label}.jsonl",
        slo,
        args.tokenizer,
        args.warmup,
        args.drain_limit,
    )
    return run, [fitting(cell, server, args.skip_long) for cell in cells]


def _request_fields(args: argparse.Namespace) -> dict[str, Any]:
    fields = request_fields(args)
    if args.window_minutes is not None:
        if args.window is not None:
            raise ValueError("give either --window or --window-minutes")
        fields["window"] = [60.0 * minutes for minutes in args.window_minutes]
    return fields


@contextmanager
def _progress(console: Console, cells: Sequence[Cell]) -> Iterator[Watch]:
    """Bars of the runs and of the requests answered in the one that is on."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as bar:
        total = bar.add_task("runs", total=len(cells))
        current = bar.add_task("requests", total=None)
        order = {cell: number for number, cell in enumerate(cells)}

        def answered(cell: Cell, done: int) -> None:
            bar.update(total, completed=order[cell])
            bar.update(current, description=cell.name, total=len(cell.requests), completed=done)

        yield Watch(lambda text: console.print(text, highlight=False, soft_wrap=True), answered)
        bar.update(total, completed=len(cells))


def _complaints(cell: Cell, record: dict[str, Any]) -> Iterator[str]:
    """What a reader of the numbers must know."""
    failed, client = record["measures"]["num_unfinished"], record["client"]
    if failed:
        error = next(filter(None, record["raw"]["errors"]), "no token").strip().splitlines()[-1]
        sent = len(cell.requests)
        yield f"{cell.name}: {failed} of {sent} requests failed, the first by: {error}"
    if other := client["num_other_length"]:
        yield f"{cell.name}: {other} answers are not as long as asked for: no vLLM server?"
    if (late_s := client["sent_late_s"]["p99"]) > LATE_S:
        yield f"{cell.name}: the client sent late, P99 {late_s * 1e3:.0f} ms: it needs more CPU"


@contextmanager
def _ends_by_exception() -> Iterator[None]:
    """A terminated command stops its client too."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
