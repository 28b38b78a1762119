"""Fit latency profiles to measured rows, print the errors, write YAML: `python -m bench.fit`."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from bench.fit_stage import calibrate_host, stage_fields
from bench.fit_vidur import vidur_fields
from bench.latency import LatencyProfile


class _Flow(list[Any]):
    """A list that YAML writes on one line."""


class _Dumper(yaml.SafeDumper):
    pass


_Dumper.add_representer(
    _Flow,
    lambda dumper, data: dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True),
)


def write_profile(path: str | Path, fields: dict[str, Any], command: str) -> LatencyProfile:
    """Validate and write a profile; the command goes into the first line. Returns the profile."""
    profile = LatencyProfile.model_validate(fields)
    shown = dict(fields)
    shown["cudagraph_capture_sizes"] = _Flow(fields.get("cudagraph_capture_sizes", []))
    for table in ("linear_table", "lm_head_table"):
        shown[table] = [_Flow(row) for row in fields[table]]
    text = yaml.dump(shown, Dumper=_Dumper, sort_keys=False, width=100)
    Path(path).write_text(f"# written by: {command}\n{text}", encoding="utf-8")
    return profile


def _command(argv: Sequence[str]) -> str:
    """The command line with folders left out and prose left to the file's own fields."""
    words: list[str] = []
    for word, before in zip(argv, ["", *argv], strict=False):
        if before in ("--notes", "--host-note"):
            words.append("...")
        else:
            words.append(Path(word).name if Path(word).exists() or before == "--out" else word)
    return f"python -m bench.fit {shlex.join(words)}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Sub-commands `stage`, `vidur` and `host`."""
    commands = parser.add_subparsers(dest="source", required=True)
    stage = commands.add_parser("stage", help="rows of one pipeline stage, JSON lines")
    vidur = commands.add_parser("vidur", help="operator times of Vidur, CSV")
    host = commands.add_parser("host", help="host work in such rows, from pipeline step logs")
    for command in (stage, host):
        command.add_argument("--rows", required=True)
        command.add_argument("--vocab-size", type=int, required=True)
    for command in (stage, vidur):
        command.add_argument("--name", required=True)
        command.add_argument("--model", required=True)
        command.add_argument("--num-hidden-layers", type=int, required=True)
        command.add_argument("--notes", default="")
        command.add_argument("--out", required=True)
    stage.add_argument("--host-step-ms", type=float, required=True)
    stage.add_argument("--host-decode-us", type=float, required=True)
    stage.add_argument("--host-note", required=True, help="where the two host times come from")
    stage.add_argument("--decode-context-ns", type=float, help="a layer; fitted if left out")
    vidur.add_argument("--mlp", required=True)
    vidur.add_argument("--attention", required=True)
    vidur.add_argument("--vocab-size", type=int, required=True)
    host.add_argument("--runs", required=True, help="folder with runs.json and steps_*.jsonl.gz")
    host.add_argument("--lengths", required=True, help="Azure conversation CSV of those runs")
    host.add_argument("--stage-layers", type=int, required=True)
    host.add_argument("--decode-context-ns", type=float, required=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one fit; errors in the input end it with a message."""
    words = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="python -m bench.fit", description=__doc__)
    add_arguments(parser)
    args = parser.parse_args(words)
    try:
        if args.source == "host":
            step_s, decode_s = calibrate_host(args)
            print(f"host work a step: {step_s * 1e3:.2f} ms + {decode_s * 1e6:.1f} us a decode")
            return 0
        fields = stage_fields(args) if args.source == "stage" else vidur_fields(args)
        profile = write_profile(args.out, fields, _command(words))
    except (OSError, ValueError) as error:
        parser.exit(2, f"{error}\n")
    fit = profile.fit
    print(f"{profile.name}: {fit.shapes} shapes, {fit.rows} rows; absolute percentage error:")
    print(f"  fit      median {fit.median_percent}  mean {fit.mean_percent}  P90 {fit.p90_percent}")
    print(
        f"  held out median {fit.heldout_median_percent}  mean {fit.heldout_mean_percent}  "
        f"P90 {fit.heldout_p90_percent}"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
