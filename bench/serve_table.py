"""Wall-clock servers of several policies under the same requests, beside the simulator's runs.

Starts one `python -m bench.wall_clock.serve` after the other, sends the workload with vLLM's own
client, simulates the same requests, and writes a page and a JSON file. What is done is kept: the
same command goes on, and a policy that has been served is not served again.
"""

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.cli_options import add_data_argument, add_request_arguments, make_spec, request_fields
from bench.live_server import LiveServer
from bench.measures import Slo
from bench.openai_server import look_at
from bench.parallel import run_all
from bench.policies import parse_policy
from bench.serve_cells import Cell, make_cells, parse_workload_word
from bench.serve_run import ServeRun, Watch, serve_cells
from bench.serve_table_page import write_page
from bench.served_record import is_finished, load
from bench.sim_spec import SimSpec
from bench.wall_clock.running import wait_for_profile

console = Console(stderr=True)


@dataclass
class WallClockServer(LiveServer):
    """Real vLLM with stages that spend a profile's time, for one policy."""

    policy: str = "stock"
    stream_interval: int = 1

    def command(self) -> list[str]:
        """The command line."""
        return [
            *(sys.executable, "-m", "bench.wall_clock.serve", "--policy", self.policy),
            *("--pp-size", str(self.pp_size), "--port", str(self.port), *self.arguments),
            *("--", "--served-model-name", "wall-clock"),
            *("--stream-interval", str(self.stream_interval)),
        ]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.serve_table", description=__doc__)
    parser.add_argument("page", type=Path, help="Markdown page; the JSON file lies beside it")
    parser.add_argument("--policies", nargs="+", required=True, help="as in bench simulate")
    parser.add_argument("--only", nargs="+", help="serve these of the policies, write no page")
    parser.add_argument("--workload", required=True, metavar="NAME[=FILE]")
    add_data_argument(parser)
    add_request_arguments(parser)
    parser.add_argument("--pp-size", type=int, default=4)
    parser.add_argument(
        "--stream-interval",
        type=int,
        default=1,
        help="tokens in a message to the client, the first alone: more leave its core and the API "
        "server's time for long runs on a small machine (default 1)",
    )
    parser.add_argument("--out", type=Path, default=Path("out") / "serve_table")
    return parser.parse_args()


def file_name(policy: str) -> str:
    """A policy as the name of a file."""
    return re.sub(r"[^A-Za-z0-9.=_-]+", "_", policy)


def served(args: argparse.Namespace, policy: str, cell: Cell) -> dict[str, Any]:
    """The record of a policy: from the file, else from a server started for it."""
    out = args.out / f"{file_name(policy)}.jsonl"
    for record in load(out):
        if is_finished(record) and record["workload"]["sha256"] == cell.sha256:
            return record
    log = out.with_suffix(".server.log")
    flushable = {"VLLM_SERVER_DEV_MODE": "1"}
    about = {"policy": policy, "stream_interval": args.stream_interval}
    with WallClockServer(Path(), args.pp_size, log, (), flushable, **about) as server:
        if parse_policy(policy).scheduler == "ours":
            wait_for_profile(log)
        console.print(f"{policy}: up, {len(cell.requests)} requests over {cell.span_s:.0f} s")
        run = ServeRun(look_at(server.url), policy, out, Slo(), num_warmups=8)
        watch = Watch(lambda text: console.print(text, soft_wrap=True), lambda *_: None)
        ((_, record),) = serve_cells(run, [cell], watch)
    return record


def simulated(args: argparse.Namespace, cell: Cell) -> list[dict[str, Any]]:
    """The simulator's records of the same requests, in the order of the policies."""
    specs: list[SimSpec] = []
    for policy in args.policies:
        workload = {**request_fields(args), **parse_workload_word(args.workload)}
        specs.append(make_spec({"workload": workload, "pp_size": args.pp_size}, policy))
    records = run_all(specs, args.out / "simulated", data=args.data, workers=1)
    for record in records:
        if record["workload"]["sha256"] != cell.sha256:
            raise RuntimeError("the simulator served other requests")
    return records


def main() -> int:
    """Serves, simulates, writes."""
    args = parse()
    (cell,) = make_cells([args.workload], request_fields(args), [], [0], 60.0, args.data)
    for policy in args.policies:
        parse_policy(policy)  # wrong words are told before anything starts
    records = [served(args, policy, cell) for policy in args.only or args.policies]
    if not args.only:
        write_page(args.page, records, simulated(args, cell), sys.argv[1:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
