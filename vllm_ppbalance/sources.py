"""Where settings come from: `--additional-config`, `PPBALANCE_...`, a YAML file, defaults.

The first source that names a knob wins, knob by knob.
"""

import json
import re
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vllm_ppbalance.config import ENV_PREFIX, Settings
from vllm_ppbalance.setting_errors import explain

ADDITIONAL_CONFIG = "--additional-config"
DEFAULT = "default"
# Variables that steer the plugin itself and are not knobs.
CONTROL_VARIABLES = frozenset({"PPBALANCE_CONFIG", "PPBALANCE_STRICT"})
# Read by the package's own test and benchmark scripts.
SCRIPT_VARIABLES = frozenset({"PPBALANCE_DATA"})

# What Kubernetes adds to every container where a Service is named ppbalance.
_SERVICE = re.compile(r"PPBALANCE_(SERVICE_(HOST|PORT).*|PORT_\d+_.*)")

# What vLLM copies to the Ray actors it starts: variables whose names begin so, commas between.
RAY_COPIED_PREFIXES = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"

_OWNERS = re.compile(r"((?:`\w+`, )*`\w+`): ")  # "`alp`, `spread`: ..." of a knob's meaning

Path_ = tuple[str, ...]


class SettingsError(ValueError):
    """A setting is wrong; the message names the knob, its value, its bound and its source."""


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """Effective settings with the source of each knob that is not at its default."""

    settings: Settings
    sources: Mapping[str, str]  # "chunk.strategy" -> source

    def source_of(self, knob: str) -> str:
        """The source of a dotted knob name."""
        return self.sources.get(knob, DEFAULT)

    def without_effect(self) -> list[str]:
        """Knobs that were set but belong to a strategy that is not in use, each in a few words."""
        found = []
        for knob, source in self.sources.items():
            section, _, name = knob.partition(".")
            own: Any = getattr(self.settings, section)
            owners = name and _OWNERS.match(type(own).model_fields[name].description or "")
            if not owners or name == "strategy" or not hasattr(own, "strategy"):
                continue
            if f"`{own.strategy}`" not in owners[1].split(", "):
                found.append(f"{knob} (from {source}) with {section}.strategy = {own.strategy}")
        return found

    def named_sources(self) -> list[str]:
        """The sources in use, each once, strongest first."""
        return list(dict.fromkeys(self.sources.values())) or ["defaults"]


def flag(name: str, environ: Mapping[str, str]) -> bool:
    """Whether a control variable is on. Raises SettingsError for an unclear value."""
    value = environ.get(name, "0").strip().lower()
    if value in ("1", "true", "on", "yes"):
        return True
    if value in ("", "0", "false", "off", "no"):
        return False
    raise SettingsError(f"{name} = {value!r} must be 1 or 0")


def carry_to_ray_actors(environ: MutableMapping[str, str]) -> None:
    """Let vLLM copy our variables to an engine core that runs as a Ray actor.

    Without this such an engine core would have the defaults, and nobody would be told.
    """
    prefix = ENV_PREFIX.rstrip("_")  # PPBALANCE too
    prefixes = [name.strip() for name in environ.get(RAY_COPIED_PREFIXES, "").split(",")]
    if prefix not in prefixes:
        environ[RAY_COPIED_PREFIXES] = ",".join([*filter(None, prefixes), prefix])


def load_settings(
    additional_config: Mapping[str, Any] | None, environ: Mapping[str, str]
) -> LoadedSettings:
    """Merge all sources into one validated `Settings`.

    `additional_config` is vLLM's own dict; only its `ppbalance` entry is read. Raises
    SettingsError, for an unclear PPBALANCE or PPBALANCE_STRICT too.
    """
    for name in ("PPBALANCE", "PPBALANCE_STRICT"):
        flag(name, environ)
    merged: dict[Path_, tuple[Any, str]] = {}
    for source, tree in _trees(additional_config, environ):
        for path, value in _leaves(tree):
            merged.setdefault(path, (value, source))
    nested: dict[str, Any] = {}
    for path, (value, source) in merged.items():
        _place(nested, path, value, source)
    names = {".".join(path): source for path, (_, source) in merged.items()}
    try:
        return LoadedSettings(Settings.model_validate(nested), names)
    except ValidationError as error:
        raise SettingsError(f"wrong setting: {explain(error, names)}") from None


def _trees(
    additional_config: Mapping[str, Any] | None, environ: Mapping[str, str]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    own = (additional_config or {}).get("ppbalance", {})
    if not isinstance(own, Mapping):
        raise SettingsError(
            f"ppbalance = {own!r} (from {ADDITIONAL_CONFIG}) must be an object of settings"
        )
    yield ADDITIONAL_CONFIG, own
    for name in sorted(environ):
        if name in CONTROL_VARIABLES | SCRIPT_VARIABLES or _SERVICE.fullmatch(name):
            continue
        if name == "PPBALANCE_PORT" and "://" in environ[name]:
            continue  # Kubernetes, too
        if name.startswith(ENV_PREFIX):
            yield name, _from_variable(name, environ[name])
    if file := environ.get("PPBALANCE_CONFIG"):
        yield file, read_yaml(Path(file))


def _from_variable(name: str, value: str) -> Mapping[str, Any]:
    parts = name.removeprefix(ENV_PREFIX).lower().split("__")
    tree: Any = _parse(value)
    for part in reversed(parts):
        tree = {part: tree}
    return dict(tree)


def _parse(value: str) -> Any:
    """JSON where it is JSON (numbers, null, lists), else the text itself."""
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def read_yaml(path: Path) -> Mapping[str, Any]:
    """The mapping in a settings file. Raises SettingsError with the reason."""
    try:
        import yaml
    except ImportError:
        raise SettingsError(f"PPBALANCE_CONFIG = {path} needs the package pyyaml") from None
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())  # a YAML error has several lines
        raise SettingsError(f"PPBALANCE_CONFIG = {path} cannot be read: {reason}") from None
    if tree is None:
        return {}
    if not isinstance(tree, Mapping):
        raise SettingsError(f"PPBALANCE_CONFIG = {path} must hold a mapping of settings")
    return tree


def _leaves(tree: Mapping[str, Any], prefix: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    for key, value in tree.items():
        path = (*prefix, str(key))
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, path)
        else:
            yield path, value


def _place(tree: dict[str, Any], path: Path_, value: Any, source: str) -> None:
    node = tree
    for part in path[:-1]:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise SettingsError(
                f"{'.'.join(path)} (from {source}): {part} is given a plain value elsewhere"
            )
    if isinstance(node.get(path[-1]), dict):
        raise SettingsError(
            f"{'.'.join(path)} = {value!r} (from {source}) must be an object of settings"
        )
    node[path[-1]] = value
