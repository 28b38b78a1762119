"""`python -m bench explain`: what held a pipeline back, and which knob would help."""

import argparse
from pathlib import Path

from bench.explain import findings, summarise
from bench.step_log import read_step_log


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("file", type=Path, help="the file that PPBALANCE_TRACE named")


def run(args: argparse.Namespace) -> int:
    """Print the numbers and the findings."""
    log = read_step_log(args.file)
    summary, settings = summarise(log), log.settings
    print(
        f"{summary.num_batches} micro-batches in {summary.seconds:.1f} s on {log.pp_size} stages; "
        f"chunk {settings['chunk']['strategy']}, rebalance {settings['rebalance']['strategy']}"
    )
    print(f"  mean TTFT {_shown(summary.ttft_s)} s (target {settings['slo_ttft']:g} s)")
    print(f"  mean token gap {_shown(summary.gap_s)} s (target {settings['slo_tpot']:g} s)")
    causes = ", ".join(f"{c.replace('_', '-')} {s:.1%}" for c, s in summary.bubbles.items())
    print(f"  estimated idle stage time {sum(summary.bubbles.values()):.1%}: {causes}")
    reasons = ", ".join(f"{reason} {share:.0%}" for reason, share in summary.reasons.items())
    print(f"  decisions: {reasons}")
    found = findings(log, summary)
    for number, finding in enumerate(found, 1):
        print(f"{number}. {finding.words[0].upper()}{finding.words[1:]}.\n   -> {finding.advice}.")
    if not found:
        print("Nothing held the pipeline back.")
    return 0


def _shown(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f}"
