"""Which scheduler a run uses: `stock:8192`, `static_cap:2048`, `ppas`, `ours:greedy/even_share`."""

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

from vllm_ppbalance.sources import SettingsError, load_settings

SCHEDULERS = ("stock", "static_cap", "ppas", "ours")
PPAS_PREFILL_CAP = 2048


class Policy(BaseModel):
    """A scheduler by name. `budget` is tokens a micro-batch may hold, None for vLLM's own.

    `settings` are the plugin's, for `ours` only; knobs left out keep the plugin's defaults.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    scheduler: Literal["stock", "static_cap", "ppas", "ours"]
    budget: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    settings: dict[str, Any] = {}


def parse_policy(text: str | dict[str, Any]) -> Policy:
    """A policy from a word as above, or from a mapping with `scheduler` and `settings`.

    `ours` takes `CHUNK/REBALANCE`, a settings file (YAML), knobs as `chunk.greedy_max_chunk=1024`,
    or several of them with commas between. Raises ValueError naming what is known.
    """
    if isinstance(text, dict):
        fields = {"name": str(text.get("scheduler", "")), **text}
        scheduler = str(fields.get("scheduler"))
        _known(scheduler, str(text))
        policy = Policy.model_validate(fields)
        _checked(policy)
        return policy
    scheduler, _, rest = text.partition(":")
    _known(scheduler, text)
    if scheduler == "ours":
        policy = Policy(name=text, scheduler="ours", settings=_settings(text, rest))
        _checked(policy)
        return policy
    if rest and not (rest.isdigit() and int(rest) > 0):
        raise ValueError(f"policy {text!r}: {rest!r} must be a token budget of at least 1")
    budget = int(rest) if rest else None
    return Policy.model_validate({"name": text, "scheduler": scheduler, "budget": budget})


def _known(scheduler: str, text: str) -> None:
    if scheduler not in SCHEDULERS:
        raise ValueError(
            f"policy {text!r}: scheduler {scheduler!r} is unknown; there are: "
            f"{', '.join(SCHEDULERS)} (as in stock:2048, ours:greedy/even_share)"
        )


def _checked(policy: Policy) -> None:
    if policy.settings and policy.scheduler != "ours":
        raise ValueError(f"policy {policy.name!r}: only `ours` takes settings")
    if policy.budget and policy.scheduler == "ours":
        raise ValueError(f"policy {policy.name!r}: give `ours` a budget by chunk.fixed_tokens")
    try:
        load_settings({"ppbalance": policy.settings}, {})
    except SettingsError as error:
        raise ValueError(f"policy {policy.name!r}: {error}") from None


def _settings(text: str, words: str) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for word in filter(None, words.split(",")):
        if "=" in word:
            knob, _, value = word.partition("=")
            _merge(settings, _tree(knob, yaml.safe_load(value)))
        elif word.endswith((".yaml", ".yml")):
            _merge(settings, _from_file(text, word))
        elif word.count("/") == 1:
            chunk, rebalance = word.split("/")
            _merge(settings, {"chunk": {"strategy": chunk}, "rebalance": {"strategy": rebalance}})
        else:
            raise ValueError(
                f"policy {text!r}: {word!r} must be CHUNK/REBALANCE, knob=value or a YAML file"
            )
    return settings


def _tree(knob: str, value: Any) -> dict[str, Any]:
    for part in reversed(knob.split(".")):
        value = {part: value}
    return dict(value)


def _from_file(text: str, path: str) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"policy {text!r}: {path}: {error}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"policy {text!r}: {path}: must hold a mapping of settings")
    return tree


def _merge(into: dict[str, Any], tree: dict[str, Any]) -> None:
    for name, value in tree.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = value
