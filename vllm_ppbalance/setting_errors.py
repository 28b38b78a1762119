"""What is wrong with settings, in one line: knob, value, source, bound, and a name that is near."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from vllm_ppbalance.config import ENV_PREFIX, Settings, all_knobs

# pydantic's words for a type, and what a user is to write.
_IN_OUR_WORDS = {
    "a valid boolean": "true or false",
    "a valid tuple": "a list such as [128, 256]",
}


def explain(error: ValidationError, sources: Mapping[str, str]) -> str:
    """All that is wrong, in one line; `sources` says where each knob that was set comes from.

    What is said of the several types that a knob may have stands behind the knob once.
    """
    told: dict[str, tuple[str, list[str]]] = {}
    for detail in error.errors():
        name = _knob_of(detail["loc"], sources)
        reason = _reason(detail, sources)
        head = name
        if name in sources:
            head = f"{name} = {detail['input']!r} (from {sources[name]})"
        told.setdefault(name, (head, []))[1].append(reason)
    return "; ".join(f"{head}: {', or: '.join(reasons)}" for head, reasons in told.values())


def _knob_of(location: tuple[int | str, ...], sources: Mapping[str, str]) -> str:
    """The knob an error is about: pydantic adds the member of a union, or the place in a list."""
    parts = [str(part) for part in location]
    for length in range(len(parts), 0, -1):
        if (name := ".".join(parts[:length])) in sources:
            return name
    return ".".join(parts)


def _reason(detail: Any, sources: Mapping[str, str]) -> str:
    if detail["type"] == "extra_forbidden":
        return f"no such setting; {_near(detail['loc'])}"
    reason: str = detail["msg"].removeprefix("Value error, ")
    for theirs, ours in _IN_OUR_WORDS.items():
        reason = reason.replace(theirs, ours)
    if detail["type"] == "literal_error" and isinstance(detail["input"], bool):
        reason += ' (YAML and JSON read a bare off or true as a truth value: write "off")'
    if detail["type"] in ("model_type", "dict_type"):
        reason = f"an object of settings is wanted; {_near((*detail['loc'], ''))}"
    if detail["type"] == "value_error":  # about several knobs of a section
        section = ".".join(map(str, detail["loc"]))
        named = [k for k in sources if k.startswith(f"{section}.") and k.split(".")[-1] in reason]
        reason += "".join(f" ({knob} from {sources[knob]})" for knob in named)
    return reason


def _near(location: tuple[int | str, ...]) -> str:
    model: Any = Settings
    for part in location[:-1]:
        model = model.model_fields[str(part)].annotation
    name = ".".join(map(str, location))
    close = get_close_matches(name, [knob for knob, _ in all_knobs()], 1, 0.85)
    hint = ""
    if close:
        variable = ENV_PREFIX + close[0].upper().replace(".", "__")
        hint = f"did you mean {close[0]} ({variable})? "
    return f"{hint}known here: {', '.join(model.model_fields)}"
