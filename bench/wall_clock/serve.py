"""A vLLM server whose stages take a profile's time, without a GPU.

Words after `--` go to `vllm serve`.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bench.vllm_cli  # noqa: F401 - names the CPU build, in spawned processes too
from bench.pipeline import LINKS
from bench.policies import parse_policy
from bench.wall_clock.launch import Deployment
from bench.wall_clock.model import MAX_POSITION
from bench.wall_clock.settings import WallClockSettings


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m bench.wall_clock.serve", description=__doc__)
    add = made.add_argument
    add("--policy", default="stock", help="stock:BUDGET, ours:CHUNK/REBALANCE, or JSON")
    add("--profile", default="h200_qwen2.5-32b", help="latency profile, by name or YAML file")
    add("--pp-size", type=int, default=4, help="pipeline stages (default 4)")
    add("--stage-layers", help="layers of each stage, as 17,16,16,15")
    add("--link", default="nvlink", help=f"between stages: {', '.join(LINKS)}")
    add("--mode", choices=("async", "sync"), default="async", help="scheduling (default async)")
    add("--no-overhead", action="store_true", help="leave out bench/pipeline_overhead.py")
    add("--kv-cache-gib", type=float, default=96.0, help="KV cache of one GPU (default 96)")
    add("--max-num-seqs", type=int, default=512, help="requests running at most (default 512)")
    add("--max-num-batched-tokens", type=int, default=8192, help="hard cap (default 8192)")
    add("--max-model-len", type=int, default=MAX_POSITION, help="longest context, in tokens")
    add("--prefix-caching", action="store_true")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add("--folder", type=Path, default=Path("out") / "wall_clock", help="models and profiles")
    add("serve", nargs="*", metavar="-- ARGUMENT", help="further arguments of vllm serve")
    return made


def deployment(args: argparse.Namespace) -> Deployment:
    """What the command line asks for. Raises ValueError naming the option."""
    layers = args.stage_layers
    if layers is not None:
        if not all(word.strip().isdigit() for word in layers.split(",")):
            raise ValueError(f"--stage-layers: {layers!r} must be numbers with commas between")
        layers = tuple(int(word) for word in layers.split(","))
    wall_clock = {
        "profile": args.profile,
        "link": args.link,
        "pipeline_overhead": not args.no_overhead,
        "kv_cache_gib": args.kv_cache_gib,
    }
    return Deployment(
        policy=parse_policy(json.loads(args.policy) if args.policy[:1] == "{" else args.policy),
        folder=args.folder.resolve(),
        settings=WallClockSettings.of({"wall_clock": wall_clock}),
        pp_size=args.pp_size,
        mode=args.mode,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.max_model_len,
        prefix_caching=args.prefix_caching,
        stage_layers=layers,
    )


def main(argv: Sequence[str] | None = None) -> Any:
    """Becomes `vllm serve`."""
    made = parser()
    args = made.parse_args(argv)
    try:
        asked = deployment(args)
        folder = asked.make_model()
    except (OSError, ValueError) as error:
        made.exit(2, f"{error}\n")
    os.environ.update(asked.environment())
    address = ("--host", args.host, "--port", str(args.port))
    sys.argv = ["vllm", "serve", str(folder), *asked.arguments([*address, *args.serve])]
    from bench.wall_clock import hook

    hook.install()
    from vllm.entrypoints.cli.main import main as vllm

    return vllm()


if __name__ == "__mp_main__":  # engine core and workers: vLLM spawns them
    from bench.wall_clock import hook

    hook.install()
elif __name__ == "__main__":
    sys.exit(main())
