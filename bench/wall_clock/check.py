"""One run on the wall clock and in virtual time: how far mean TPOT and throughput are apart.

`python -m bench.wall_clock.check` starts a server, sends the workload with real clients, and
simulates the same requests. The simulated host takes this machine's time, not a GPU server's: what
a round takes more here is found before the workload, with requests that are alone and with as many
as fill the pipeline. The simulation with a GPU server's host is shown beside it. Exit status 1
when a difference is over the limit.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from bench.cli_options import add_spec_arguments, make_spec, spec_fields
from bench.measures import Measures
from bench.sim_world import build_workload
from bench.wall_clock.host_time import extra_time, slower
from bench.wall_clock.runs import in_virtual_time, on_the_wall_clock, virtual_gaps, with_host


def compare(real: Measures, virtual: Measures) -> dict[str, Any]:
    """Figures side by side, and by what share the real ones are larger."""
    pairs = {
        "mean TPOT (ms)": (real.tpot_s.mean * 1e3, virtual.tpot_s.mean * 1e3),
        "P90 TPOT (ms)": (real.tpot_s.p90 * 1e3, virtual.tpot_s.p90 * 1e3),
        "mean TTFT (ms)": (real.ttft_s.mean * 1e3, virtual.ttft_s.mean * 1e3),
        "output tok/s": (real.output_tok_per_s, virtual.output_tok_per_s),
    }
    return {
        name: {"wall clock": ours, "virtual": theirs, "difference": ours / theirs - 1.0}
        for name, (ours, theirs) in pairs.items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run both, print, judge."""
    parser = argparse.ArgumentParser(prog="python -m bench.wall_clock.check", description=__doc__)
    add_spec_arguments(parser)
    parser.add_argument("--policy", help="stock:8192 or ours:CHUNK/REBALANCE")
    parser.add_argument("--limit", type=float, default=0.1, help="largest difference (default 0.1)")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    args = parser.parse_args(argv)
    try:
        spec = make_spec(spec_fields(args), args.policy)
        requests = build_workload(spec, args.data)
        served = on_the_wall_clock(spec, requests)
        extra_s = extra_time(served.gaps, partial(virtual_gaps, spec))
        gaps = {"wall clock": served.gaps, "virtual": virtual_gaps(spec, extra_s)}
        here = in_virtual_time(with_host(spec, slower(spec.host, extra_s)), requests)
        elsewhere = in_virtual_time(spec, requests)
    except (OSError, ValueError, RuntimeError) as error:
        parser.exit(2, f"{error}\n")
    figures = compare(served.measures, here)
    of_gpu_server = compare(served.measures, elsewhere)
    print(f"{spec.policy.name}, {spec.mode}, {len(requests)} requests")
    print(f"this host takes {extra_s * 1e3:.2f} ms more a round than a GPU server's; with it:")
    for name, found in gaps.items():
        print(f"{name}: {found.alone_s * 1e3:.2f} ms a token alone, {found.full_s * 1e3:.2f} full")
    show(figures)
    print("beside the host of a GPU server:")
    show(of_gpu_server)
    if args.out:
        kept = {
            "extra host time a round (ms)": extra_s * 1e3,
            "token gaps it was found from (s)": {k: asdict(v) for k, v in gaps.items()},
            "figures": figures,
            "figures beside the host of a GPU server": of_gpu_server,
        }
        args.out.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    judged = (figures["mean TPOT (ms)"], figures["output tok/s"])
    return int(any(abs(row["difference"]) > args.limit for row in judged))


def show(figures: dict[str, Any]) -> None:
    """Prints a line a figure."""
    for name, row in figures.items():
        print(
            f"{name:16} wall clock {row['wall clock']:9.2f}  virtual {row['virtual']:9.2f}  "
            f"{row['difference']:+.1%}"
        )


if __name__ == "__main__":
    sys.exit(main())
