"""The options that make up a run, shared by the commands; they override a spec file's fields."""

import argparse
import os
from pathlib import Path
from typing import Any

import yaml

from bench.pipeline import LINKS
from bench.policies import parse_policy
from bench.sim_spec import SimSpec
from bench.workloads import WORKLOADS

# option -> (field of WorkloadSpec, type, help)
_REQUESTS: dict[str, tuple[str, Any, str]] = {
    "--arrival": ("arrival", str, "trace, poisson, gamma or constant"),
    "--rate": ("rate", float, "requests a second"),
    "--cv": ("cv", float, "gamma arrivals: standard deviation over mean of the gaps"),
    "--num-prompts": ("num_prompts", int, "requests at most"),
    "--speed": ("speed", float, "the trace this many times as fast"),
    "--sample-ratio": ("sample_ratio", float, "share of the trace's rows to keep"),
    "--max-output-tokens": ("max_output_tokens", int, "longer outputs are cut"),
}
_RUN: dict[str, tuple[str, Any, str]] = {
    "--pp-size": ("pp_size", int, "pipeline stages (default 4)"),
    "--profile": ("profile", str, "latency profile, by name or YAML file"),
    "--max-num-seqs": ("max_num_seqs", int, "requests running at most (default 512)"),
    "--max-num-batched-tokens": ("max_num_batched_tokens", int, "hard cap (default 8192)"),
    "--kv-cache-gib": ("kv_cache_gib", float, "KV cache of one GPU (default 96)"),
    "--noise": ("noise", float, "log standard deviation of stage times (default 0)"),
    "--seed": ("seed", int, "seed of the noise"),
    "--time-limit-s": ("time_limit_s", float, "stop at this virtual time"),
}
_DEFAULT_POLICY = "ours"


def add_data_argument(parser: argparse.ArgumentParser) -> None:
    """--data, the folder of trace files."""
    parser.add_argument(
        "--data",
        type=Path,
        default=Path(os.environ["PPBALANCE_DATA"]) if "PPBALANCE_DATA" in os.environ else None,
        help="folder in which relative paths of traces are looked up (default: $PPBALANCE_DATA)",
    )


def add_spec_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything but the policy."""
    add_data_argument(parser)
    parser.add_argument("--spec", type=Path, help="YAML file with the fields of a run")
    parser.add_argument("--workload", help=f"one of: {', '.join(WORKLOADS)}")
    parser.add_argument("--path", help="trace file; relative ones are looked up in --data")
    parser.add_argument("--workload-seed", type=int, help="seed of arrivals and lengths")
    add_request_arguments(parser)
    for option, (_, kind, text) in _RUN.items():
        parser.add_argument(option, type=kind, help=text)
    parser.add_argument("--stage-layers", help="layers of each stage, as 17,16,16,15")
    parser.add_argument("--link", help=f"between stages: {', '.join(LINKS)}")
    parser.add_argument("--mode", help="async (as on GPUs, default) or sync")
    parser.add_argument("--prefix-caching", action="store_true", default=None)
    parser.add_argument(
        "--no-overhead",
        dest="pipeline_overhead",
        action="store_false",
        default=None,
        help="leave out what real pipelines were seen to add (bench/pipeline_overhead.py)",
    )
    add_slo_arguments(parser)


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """What to take of a workload, and when to send it."""
    parser.add_argument("--window", nargs=2, type=float, metavar=("START", "END"), help="seconds")
    for name in ("--prompt-range", "--output-range"):
        parser.add_argument(name, nargs=2, type=int, metavar=("LOW", "HIGH"), help="tokens")
    for option, (_, kind, text) in _REQUESTS.items():
        parser.add_argument(option, type=kind, help=text)


def add_slo_arguments(parser: argparse.ArgumentParser) -> None:
    """The targets that a run is judged by."""
    parser.add_argument("--slo-ttft", type=float, help="seconds (default 2)")
    parser.add_argument("--slo-tpot", type=float, help="seconds (default 0.2)")


def read_yaml(path: Path) -> dict[str, Any]:
    """A mapping from a YAML file. Raises ValueError naming the file."""
    try:
        fields = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: must hold a mapping")
    return fields


def spec_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Plain fields of a run from --spec and the options, without its policy."""
    fields = read_yaml(args.spec) if args.spec else {}
    workload = dict(fields.get("workload") or {})
    _override(workload, "name", args.workload)
    _override(workload, "path", args.path)
    _override(workload, "seed", args.workload_seed)
    workload |= request_fields(args)
    _options(args, _RUN, fields)
    if "name" not in workload:
        raise ValueError(f"--workload must name one of: {', '.join(WORKLOADS)}")
    for name in ("link", "mode", "prefix_caching", "pipeline_overhead"):
        _override(fields, name, getattr(args, name))
    if args.stage_layers is not None:
        fields["stage_layers"] = [_layers(word) for word in args.stage_layers.split(",")]
    slo = {**(fields.get("slo") or {}), **slo_fields(args)}
    return {**fields, "workload": workload, "slo": slo}


def request_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of a workload that the options of `add_request_arguments` give."""
    fields: dict[str, Any] = {}
    for name in ("window", "prompt_range", "output_range"):
        _override(fields, name, getattr(args, name))
    _options(args, _REQUESTS, fields)
    return fields


def slo_fields(args: argparse.Namespace) -> dict[str, float]:
    """Targets that the options give, seconds."""
    fields: dict[str, float] = {}
    _override(fields, "ttft_s", args.slo_ttft)
    _override(fields, "tpot_s", args.slo_tpot)
    return fields


def make_spec(fields: dict[str, Any], policy: str | dict[str, Any] | None = None) -> SimSpec:
    """A spec with a policy: the one given, else the fields' own, else the plugin's defaults."""
    chosen = policy if policy is not None else fields.get("policy", _DEFAULT_POLICY)
    return SimSpec.parse({**fields, "policy": parse_policy(chosen).model_dump()})


def _layers(word: str) -> int:
    if not word.strip().isdigit():
        raise ValueError(f"--stage-layers: {word!r} must be a number of layers")
    return int(word)


def _options(
    args: argparse.Namespace, options: dict[str, tuple[str, Any, str]], into: dict[str, Any]
) -> None:
    for option, (name, _, _) in options.items():
        _override(into, name, getattr(args, option[2:].replace("-", "_")))


def _override(into: dict[str, Any], name: str, value: Any) -> None:
    if value is not None:
        into[name] = value
