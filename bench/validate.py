"""Real pipeline runs beside simulated ones: errors, targets, and the order of the budgets."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from bench.policies import parse_policy
from bench.sim_spec import SimSpec
from bench.workloads import real_run_spec

AZURE_CONV = "azure/AzureLLMInferenceTrace_conv.csv"
FIELDS = ("name", "request_rate", "num_prompts", "max_num_scheduled_tokens", "decode_even_share")

# Largest allowed absolute relative errors; the swapped run has its own for throughput.
TARGETS = {"output_tok_per_s": 0.05, "tpot_mean_s": 0.12, "ttft_mean_s": 0.25}
SWAPPED_THROUGHPUT = 0.10
ORDERED = ("ttft_mean_s", "tpot_p90_s", "slo_attainment")


@dataclass(frozen=True, slots=True)
class Numbers:
    """What both worlds report, seconds and tokens a second."""

    output_tok_per_s: float
    ttft_mean_s: float
    ttft_p90_s: float
    tpot_mean_s: float
    tpot_p90_s: float
    slo_attainment: float

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Numbers":
        """From an entry of `runs.json`, or from the measures of a simulated run."""
        return cls(
            float(record["output_tok_per_s"]),
            float(record["ttft_s"]["mean"]),
            float(record["ttft_s"]["p90"]),
            float(record["tpot_s"]["mean"]),
            float(record["tpot_s"]["p90"]),
            float(record["slo_attainment"]),
        )


@dataclass(frozen=True, slots=True)
class Pair:
    """A real run and its simulation."""

    run: Mapping[str, Any]
    real: Numbers
    simulated: Numbers

    @property
    def swapped(self) -> bool:
        """Prompt and output lengths exchanged."""
        return "swapped" in str(self.run["lengths"])

    def error(self, field: str) -> float:
        """Relative error of the simulation."""
        real = float(getattr(self.real, field))
        return float(getattr(self.simulated, field)) / real - 1.0

    def misses(self) -> list[str]:
        """Targets missed, as text."""
        missed = []
        for field, bound in TARGETS.items():
            if self.swapped and field == "output_tok_per_s":
                bound = SWAPPED_THROUGHPUT
            if abs(self.error(field)) > bound:
                missed.append(f"{field} {self.error(field):+.1%}, target {bound:.0%}")
        return missed


def load_runs(folder: Path) -> list[dict[str, Any]]:
    """The entries of `runs.json`. Raises ValueError naming what an entry lacks."""
    path = folder / "runs.json"
    runs = json.loads(path.read_text(encoding="utf-8"))
    for index, run in enumerate(runs):
        for field in FIELDS:
            if field not in run:
                raise ValueError(f"{path}: entry {index} has no {field!r}")
    return list(runs)


def spec_of(run: Mapping[str, Any], lengths: Path, **fields: Any) -> SimSpec:
    """The run in virtual time: PP=2 as measured, even-share runs with our scheduler."""
    budget = int(run["max_num_scheduled_tokens"])
    policy = f"stock:{budget}"
    if run["decode_even_share"]:
        policy = f"ours:fixed/even_share,chunk.fixed_tokens={budget}"
    swapped = "swapped" in str(run["lengths"])
    workload = real_run_spec(lengths, run["request_rate"], int(run["num_prompts"]), swapped)
    return SimSpec.parse(
        {
            "workload": asdict(workload),
            "policy": parse_policy(policy).model_dump(),
            "pp_size": 2,
            "kv_cache_gib": 84.0,
            **fields,
        }
    )


def pair_up(
    runs: Sequence[Mapping[str, Any]], simulate: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> Iterator[Pair]:
    """Each run with the measures that `simulate` gives for it."""
    for run in runs:
        yield Pair(run, Numbers.of(run), Numbers.of(simulate(run)))


def wrong_orders(pairs: Sequence[Pair]) -> list[str]:
    """Budgets that the simulation orders otherwise than reality, at one rate and workload.

    Two runs that are equal in reality have no order to get wrong; a tie in simulation is wrong.
    """
    wrong = []
    for a, b in combinations(pairs, 2):
        alike = ("request_rate", "lengths", "decode_even_share", "num_prompts")
        if any(a.run[key] != b.run[key] for key in alike):
            continue
        for field in ORDERED:
            real = getattr(a.real, field) - getattr(b.real, field)
            simulated = getattr(a.simulated, field) - getattr(b.simulated, field)
            if real * simulated <= 0.0 and real != 0.0:
                wrong.append(
                    f"{field} at {a.run['request_rate']} req/s: {a.run['name']} and "
                    f"{b.run['name']} are {getattr(a.real, field):.4f} and "
                    f"{getattr(b.real, field):.4f}, simulated "
                    f"{getattr(a.simulated, field):.4f} and {getattr(b.simulated, field):.4f}"
                )
    return wrong
