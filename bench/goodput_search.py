"""The highest rate that keeps the SLO, by bisection; the rules share the runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.cli_options import make_spec
from bench.measures import RequestRecord, Rule, Slo, goodput, joint_rule, p90_rule
from bench.sweep import at_rate

RULES = ("P90 TTFT and P90 TPOT", "joint 90 %", "joint 99 %")


@dataclass(frozen=True, slots=True)
class Bounds:
    """Rates to search between, requests a second, and how long each run sends, seconds."""

    low: float
    high: float
    tolerance: float
    duration_s: float


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests a second by rule, and whether the search ended at an end of its range."""

    policy: str
    rates: dict[str, float]
    runs: int


def search(
    policy: str | dict[str, Any], fields: dict[str, Any], bounds: Bounds, data: Path | None
) -> Goodput:
    """Goodput of one policy on the workload of `fields`, for each of RULES.

    A run whose requests were not all served within its time limit keeps no rule.
    """
    from bench.simulate import simulate

    cache: dict[float, Sequence[RequestRecord]] = {}

    def run_at_rate(rate: float) -> Sequence[RequestRecord]:
        if rate not in cache:
            workload = at_rate(fields["workload"], rate)
            workload.pop("window", None)
            workload["num_prompts"] = max(1, round(rate * bounds.duration_s))
            outcome = simulate(make_spec({**fields, "workload": workload}, policy), data)
            done = not outcome.result["measures"]["num_unfinished"]
            cache[rate] = outcome.records if done else ()
        return cache[rate]

    slo = Slo(**fields.get("slo", {}))
    rules: Sequence[Rule] = (p90_rule(slo), joint_rule(slo, 0.90), joint_rule(slo, 0.99))
    rates = {
        name: goodput(run_at_rate, _served(rule), bounds.low, bounds.high, bounds.tolerance)
        for name, rule in zip(RULES, rules, strict=True)
    }
    return Goodput(make_spec(fields, policy).policy.name, rates, len(cache))


def _served(rule: Rule) -> Callable[[Sequence[RequestRecord]], bool]:
    return lambda records: bool(records) and rule(records)


def shown(rate: float, bounds: Bounds) -> str:
    """A rate as text; at an end of the range it is only a bound."""
    if rate == 0.0:
        return f"< {bounds.low:g}"
    return f">= {rate:g}" if rate >= bounds.high else f"{rate:.2f}"
