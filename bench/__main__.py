"""`python -m bench simulate|sweep|goodput|serve|compare|fit|trace|explain|validate`."""

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence

_COMMANDS = {
    "simulate": ("bench.cli_simulate", "serve one workload once in virtual time"),
    "sweep": ("bench.cli_sweep", "policies x workloads x rates, on all cores or on Ray"),
    "goodput": ("bench.cli_goodput", "the highest rate that keeps the SLO, by bisection"),
    "serve": ("bench.cli_serve", "a running server under vLLM's own load generator"),
    "compare": ("bench.cli_compare", "results side by side: table and figures"),
    "trace": ("bench.cli_trace", "a server's step log as a Chrome trace and as a picture"),
    "explain": ("bench.cli_explain", "what held the pipeline back, from a server's step log"),
    "validate": ("bench.cli_validate", "real runs beside simulated ones"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; wrong input ends it with one line."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["fit"]:
        from bench.fit import main as fit

        return fit(words[1:])
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("fit", help="latency profiles from measured rows", add_help=False)
    for name, (_, text) in _COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    command = parser.parse_known_args(words[:1])[0].command
    # Imported only now: the simulator needs vLLM, reading results does not.
    _quiet()
    module = importlib.import_module(_COMMANDS[command][0])
    own = argparse.ArgumentParser(prog=f"python -m bench {command}", description=module.__doc__)
    module.add_arguments(own)
    args = own.parse_args(words[1:])
    try:
        return int(module.run(args))
    except (OSError, ValueError, RuntimeError) as error:
        own.exit(2, f"{error}\n")


def _quiet() -> None:
    """Nothing to download, and of vLLM's log only what is wrong."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(logging.ERROR)


if __name__ == "__main__":
    raise SystemExit(main())
