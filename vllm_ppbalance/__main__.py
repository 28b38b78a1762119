"""`python -m vllm_ppbalance config`, `check`, `profile`, and `top`."""

import argparse
import json
import os
import sys
from typing import Any

from vllm_ppbalance import __version__
from vllm_ppbalance.config import Settings, all_knobs
from vllm_ppbalance.cost_model import CostModel
from vllm_ppbalance.sources import (
    ADDITIONAL_CONFIG,
    LoadedSettings,
    SettingsError,
    load_settings,
)
from vllm_ppbalance.top import top


def value_of(settings: Settings, knob: str) -> Any:
    """The value of a dotted knob name."""
    value: Any = settings
    for part in knob.split("."):
        value = getattr(value, part)
    return value


def print_config(loaded: LoadedSettings) -> None:
    """Print every knob, its effective value, and where the value came from."""
    names = [name for name, _ in all_knobs()]
    width = max(map(len, names))
    for name in names:
        text = json.dumps(value_of(loaded.settings, name))
        print(f"{name:<{width}}  {text:<14}  {loaded.source_of(name)}")
    for unused in loaded.without_effect():
        print(f"ppbalance: no effect: {unused}", file=sys.stderr)


def markdown_table() -> str:
    """The README's settings table."""
    rows = ["| setting | default | unit | bounds | meaning |", "|---|---|---|---|---|"]
    defaults = Settings()
    schema = Settings.model_json_schema()
    for name, field in all_knobs():
        extra = field.json_schema_extra or {}
        meaning = field.description or ""
        if extra.get("published"):
            meaning += f" Published as `{extra['published']}`."
        default = json.dumps(value_of(defaults, name)).strip('"')
        bounds = _bounds(_property(schema, name))
        rows.append(f"| `{name}` | {default} | {extra.get('unit', '')} | {bounds} | {meaning} |")
    return "\n".join(rows)


def _property(schema: dict[str, Any], knob: str) -> dict[str, Any]:
    node = schema
    for part in knob.split("."):
        node = node["properties"][part]
        reference = node.get("$ref") or next(
            (option["$ref"] for option in node.get("allOf", []) if "$ref" in option), None
        )
        if reference:
            node = schema["$defs"][reference.rsplit("/", 1)[-1]]
    return node


def _bounds(node: dict[str, Any]) -> str:
    if "enum" in node:
        return ", ".join(map(str, node["enum"]))
    parts = [_bounds(option) for option in node.get("anyOf", [])]
    if node.get("type") == "null":
        return "unset"
    low, high = node.get("minimum"), node.get("maximum")
    if node.get("exclusiveMinimum") is not None:
        parts.append(f"over {node['exclusiveMinimum']:g}, to {high:g}")
    elif node.get("exclusiveMaximum") is not None:
        parts.append(f"{low} to under {node['exclusiveMaximum']}")
    elif low is not None:
        parts.append(f"{low} to {high}")
    return " or ".join(part for part in parts if part)


def print_check() -> bool:
    """Print which vLLM is installed and each seam; True when all is well."""
    from vllm_ppbalance import compatibility

    print(f"vllm-ppbalance {__version__}")
    print(f"distribution   {compatibility.installed_distribution()}")
    try:
        version = compatibility.vllm_version()
    except ImportError as error:
        print(f"vllm           cannot be imported: {error}")
        return False
    oldest, newest = (
        ".".join(map(str, bound)) for bound in (compatibility.OLDEST, compatibility.NEWEST)
    )
    print(f"vllm           {version} (supported: {oldest} to {newest})")
    for name, present in compatibility.check_seams():
        print(f"  {'ok     ' if present else 'MISSING'} {name}")
    problem = compatibility.incompatibility()
    print(f"result         {problem or 'usable'}")
    return problem is None


def print_profile(engine: list[str], limit_s: float) -> int:
    """Measure a deployment and print its stage times by tokens."""
    from vllm_ppbalance.profiling import profile_offline

    try:
        path = profile_offline(engine, limit_s)
    except (SettingsError, TimeoutError) as error:
        print(f"ppbalance: {error}", file=sys.stderr)
        return 1
    model = CostModel.from_dict(json.loads(path.read_text(encoding="utf-8"))["model"])
    print(f"profile {path}")
    print(f"tile    {model.tile() or 'none found'}")
    print("tokens  stage ms")
    for tokens in (64, 128, 256, 512, 1024, 2048, 4096, 8192):
        print(f"{tokens:>6}  {1000 * model.predict(tokens, ((tokens, 0),), 0, 0):8.2f}")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run a command; the exit status is 0 when all is well, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m vllm_ppbalance", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    config = commands.add_parser("config", help="effective settings and where each came from")
    config.add_argument("--markdown", action="store_true", help="the README's settings table")
    config.add_argument(
        "--additional-config", default="{}", help="the JSON given to `vllm serve`, if any"
    )
    commands.add_parser("check", help="installed vLLM, and whether each seam we use is there")
    profile = commands.add_parser(
        "profile", help="measure a deployment's stage times: profile --model NAME -pp 4 ..."
    )
    profile.add_argument("--limit", type=float, default=600.0, help="seconds of measuring at most")
    live = commands.add_parser("top", help="live view of a running server, from its /metrics page")
    live.add_argument("--url", default="http://localhost:8000", help="the server's address")
    live.add_argument("--every", type=float, default=2.0, help="seconds between two looks")
    live.add_argument("--once", action="store_true", help="print once and end")
    arguments, engine = parser.parse_known_args(argv)
    if arguments.command == "profile":
        if not any(word.split("=")[0] in ("--model", "--config") for word in engine):
            parser.error("profile wants the model as the server gets it: --model NAME")
        return print_profile(engine, arguments.limit)
    if engine:
        parser.error(f"unknown arguments: {' '.join(engine)}")
    if arguments.command == "top":
        return top(arguments.url, max(arguments.every, 0.1), arguments.once)
    if arguments.command == "check":
        return 0 if print_check() else 1
    if arguments.markdown:
        print(markdown_table())
        return 0
    try:
        print_config(load_settings(_additional(arguments.additional_config), os.environ))
    except SettingsError as error:
        print(f"ppbalance: {error}", file=sys.stderr)
        return 1
    return 0


def _additional(text: str) -> dict[str, Any]:
    """The object given to vLLM; says so where nothing in it is for us."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise SettingsError(f"{ADDITIONAL_CONFIG} = {text!r} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise SettingsError(f"{ADDITIONAL_CONFIG} = {text!r} must be an object")
    if found and "ppbalance" not in found:
        print(f"ppbalance: {ADDITIONAL_CONFIG} has no entry ppbalance: not read", file=sys.stderr)
    return found


if __name__ == "__main__":
    sys.exit(main())
