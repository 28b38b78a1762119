"""`python -m bench validate DIR`: real runs of two H200 beside the same runs in virtual time."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.batch import BatchShape
from bench.cli_options import add_data_argument
from bench.cli_progress import track
from bench.parallel import run_all
from bench.sim_spec import profile_of
from bench.step_excess import Excess, alone, back_to_back, excess_table, read_log
from bench.trace_files import read_azure
from bench.validate import AZURE_CONV, Pair, load_runs, pair_up, spec_of, wrong_orders

NOTES = """\
What was taken from these very runs, and is therefore not tested by them:
- the host time per step and per decode that the profile takes off the measured rows (a fit to
  decode-only steps of the logs: configs/latency_profiles), two numbers;
- the engine thread's time per step, row and new request (vLLM's schedule() as logged);
- the pipeline overhead, a FUDGE: micro-batches with prompts and 130 to 1,100 tokens take up to
  0.13 ms a layer longer than rows measured on one stage alone, large ones in a row 3 % more: the
  GPU's clock under sustained load (bench/pipeline_overhead.py; --excess prints what it was read
  from, --no-overhead leaves it out)."""

STAGE_LAYERS = 32

_COLUMNS = (
    ("output_tok_per_s", "tok/s", 1.0, "{:8.1f}"),
    ("ttft_mean_s", "mean TTFT ms", 1e3, "{:8.1f}"),
    ("ttft_p90_s", "P90 TTFT ms", 1e3, "{:8.1f}"),
    ("tpot_mean_s", "mean TPOT ms", 1e3, "{:8.2f}"),
    ("tpot_p90_s", "P90 TPOT ms", 1e3, "{:8.2f}"),
    ("slo_attainment", "attainment", 1.0, "{:8.4f}"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("folder", type=Path, help="folder with runs.json and steps_*.jsonl.gz")
    add_data_argument(parser)
    parser.add_argument("--lengths", type=Path, help=f"default: {AZURE_CONV} in --data")
    parser.add_argument("--out", type=Path, default=Path("out/validate"), help="run records")
    parser.add_argument("--workers", type=int, help="processes (default: all cores)")
    parser.add_argument("--no-even-share", action="store_true", help="only vLLM's own scheduler")
    parser.add_argument("--no-overhead", action="store_true", help="without the fudge")
    parser.add_argument("--excess", action="store_true", help="only what the step logs exceed")


def run(args: argparse.Namespace) -> int:
    """Print both worlds; 0 when all targets are met, else 1."""
    runs = load_runs(args.folder)
    lengths = _lengths_path(args)
    if args.excess:
        _print_excess(args.folder, runs, lengths)
        return 0
    if args.no_even_share:
        runs = [run for run in runs if not run["decode_even_share"]]
    specs = [spec_of(run, lengths, pipeline_overhead=not args.no_overhead) for run in runs]
    with track("real runs in virtual time", len(specs)) as done:
        records = run_all(specs, args.out, workers=args.workers, done=done)
    measures = {run["name"]: record["measures"] for run, record in zip(runs, records, strict=True)}
    pairs = list(pair_up(runs, lambda run: measures[run["name"]]))
    stock = [pair for pair in pairs if not pair.run["decode_even_share"]]
    ours = [pair for pair in pairs if pair.run["decode_even_share"]]
    print(f"simulated with {records[0]['versions']}")
    return _report(stock, ours)


def _report(stock: Sequence[Pair], ours: Sequence[Pair]) -> int:
    print("\nvLLM's own scheduler (real / simulated / error):")
    _print_pairs(stock)
    if ours:
        print("\nEven share of decodes, ours in simulation (not a target):")
        _print_pairs(ours)
    misses = [f"{pair.run['name']}: {miss}" for pair in stock for miss in pair.misses()]
    wrong = wrong_orders(stock)
    print("\n" + NOTES)
    print(f"\ntargets missed: {len(misses)}")
    print("".join(f"  {miss}\n" for miss in misses), end="")
    print(f"orders of budgets wrong: {len(wrong)}")
    print("".join(f"  {line}\n" for line in wrong), end="")
    return 1 if misses or wrong else 0


def _print_pairs(pairs: Sequence[Pair]) -> None:
    print(f"{'run':15}" + "".join(f" | {title:^25}" for _, title, _, _ in _COLUMNS))
    for pair in pairs:
        cells = []
        for field, _, scale, form in _COLUMNS:
            real = form.format(getattr(pair.real, field) * scale)
            simulated = form.format(getattr(pair.simulated, field) * scale)
            cells.append(f" | {real} {simulated} {pair.error(field):+7.1%}")
        print(f"{pair.run['name']:15}" + "".join(cells))


def _lengths_path(args: argparse.Namespace) -> Path:
    if args.lengths is not None:
        return Path(args.lengths)
    data = args.data if args.data is not None else args.folder.parent
    path = Path(data) / AZURE_CONV
    if not path.is_file():
        raise ValueError(f"{path}: not there; name the Azure conversation file by --lengths")
    return path


def _print_excess(folder: Path, runs: Sequence[dict[str, Any]], lengths: Path) -> None:
    stage = profile_of("h200_qwen2.5-32b").compiled
    rows = read_azure(lengths)

    def first(shape: BatchShape) -> float:
        return stage(shape, STAGE_LAYERS, True, False)

    def last(shape: BatchShape) -> float:
        return stage(shape, STAGE_LAYERS, False, True)

    single: list[tuple[int, float, float]] = []
    following: list[tuple[int, float, float]] = []
    for run in runs:
        log = folder / f"steps_{run['name']}.jsonl.gz"
        if not log.is_file():
            continue
        pairs = [(r.prompt_tokens, r.output_tokens) for r in rows[: run["num_prompts"]]]
        if "swapped" in run["lengths"]:
            pairs = [(out, prompt) for prompt, out in pairs]
        steps = read_log(log, [(prompt, min(out, 2000)) for prompt, out in pairs])
        single += alone(steps, first, last)
        following += back_to_back(steps, last)
    print("A step with prompts after two small steps: real over profile, both stages")
    _print_table(excess_table(single), 2 * STAGE_LAYERS)
    print("A large step after two alike: real time between completions over the last stage's")
    _print_table(excess_table(following), STAGE_LAYERS)


def _print_table(table: Sequence[Excess], layers: int) -> None:
    print(f"{'tokens':>14} {'steps':>7} {'profile ms':>11} {'excess ms':>10} {'us a layer':>11}")
    for row in table:
        print(
            f"{row.low:>6} - {row.high:>5} {row.steps:>7} {row.profile_s * 1e3:>11.2f} "
            f"{row.excess_s * 1e3:>10.2f} {row.excess_s * 1e6 / layers:>11.1f}"
        )
