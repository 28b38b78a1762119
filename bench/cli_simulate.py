"""`python -m bench simulate`: one run, printed and written."""

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from bench.chrome_trace import write_trace
from bench.cli_options import add_spec_arguments, make_spec, spec_fields
from bench.sim_world import build_workload
from bench.simulate import Outcome, simulate
from bench.timeline import of_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_spec_arguments(parser)
    parser.add_argument("--policy", help="stock:8192, static_cap:2048, ppas, ours:CHUNK/REBALANCE")
    parser.add_argument("--out", type=Path, help="result file (default: out/runs/KEY.json)")
    parser.add_argument("--trace", type=Path, help="Chrome trace for ui.perfetto.dev")
    parser.add_argument("--figure", type=Path, help="figure of the stages' rows, bubbles marked")


def run(args: argparse.Namespace) -> int:
    """Run, print, write."""
    spec = make_spec(spec_fields(args), args.policy)
    requests = build_workload(spec, args.data)
    span_s = max(r.arrival_s for r in requests)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"{spec.policy.name} on {spec.workload.name}", total=span_s)
        outcome = simulate(
            spec,
            requests=requests,
            keep_rows=args.trace is not None,
            progress=lambda now_s: bar.update(task, completed=min(now_s, span_s)),
        )
    path = args.out or Path("out") / "runs" / f"{spec.key}.json"
    outcome.write(path)
    if args.trace is not None:
        write_trace(args.trace, of_run(outcome))
    if args.figure is not None:
        from bench.figures import stage_rows

        stage_rows(args.figure, [of_run(outcome)])
    print_outcome(outcome)
    print(f"written: {path}")
    return 0


def _line(name: str, values: dict[str, Any]) -> str:
    shown = "  ".join(
        f"{key} {value * 1e3:9.1f}" if value is not None else f"{key}         -"
        for key, value in values.items()
    )
    return f"  {name:5} ms  {shown}"


def print_outcome(outcome: Outcome) -> None:
    """The measures of a run on a page."""
    result, real = outcome.result, outcome.real
    measures, pipeline = result["measures"], result["pipeline"]
    print(
        f"{outcome.spec.policy.name} on {outcome.spec.workload.name}, PP={outcome.spec.pp_size}: "
        f"{measures['num_requests']} requests done, {measures['num_unfinished']} not, "
        f"{pipeline['end_s']:.1f} s of virtual time in {real['wall_s']:.1f} s"
    )
    if not measures["num_requests"]:
        return
    for name in ("ttft_s", "tpot_s", "itl_s", "e2el_s"):
        print(_line(name.removesuffix("_s").upper(), measures[name]))
    print(
        f"  SLO attainment {measures['slo_attainment']:.4f}; output "
        f"{measures['output_tok_per_s']:.1f} tok/s, total {measures['total_tok_per_s']:.1f} tok/s"
    )
    causes = ", ".join(
        f"{name.replace('_', '-')} {share:.3f}"
        for name, share in pipeline["bubble_ratio_by_cause"].items()
    )
    busy = " ".join(f"{share:.3f}" for share in pipeline["busy_share"])
    print(f"  bubble ratio {pipeline['bubble_ratio']:.3f} ({causes}); busy {busy}")
    print(
        f"  {pipeline['steps']} steps of {pipeline['tokens_per_step']:.0f} tokens, decodes differ "
        f"by {pipeline['decode_spread']['max_minus_min']:.2f}, {result['num_moves']} moves, "
        f"{result['preemptions']} preemptions"
    )
    print(
        f"  real: schedule() {real['schedule_us']['mean']:.0f} us, the policy's part "
        f"{real['own_schedule_us']['mean']:.1f} us ({real['own_share_of_schedule']:.1%} of vLLM's)"
    )
