"""What a run achieved: latencies, throughput, SLO attainment, goodput. Names as in vLLM's bench."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One finished request, seconds on the run's clock; `token_times_s` where they were kept."""

    request_id: str
    arrival_s: float
    first_token_s: float
    last_token_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    token_times_s: tuple[float, ...] | None = None

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """(last - first token) / (n - 1); None for one token."""
        if self.num_output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.num_output_tokens - 1)

    @property
    def e2el_s(self) -> float:
        """From arrival to the last token."""
        return self.last_token_s - self.arrival_s


@dataclass(frozen=True, slots=True)
class Summary:
    """Mean and percentiles, seconds; nan where there was nothing to measure."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Summary":
        """Percentiles interpolate linearly between values, as numpy's and vLLM's do."""
        if not values:
            return cls(*(math.nan,) * 5)
        return cls(float(np.mean(values)), *map(float, np.percentile(values, (50, 90, 95, 99))))


@dataclass(frozen=True, slots=True)
class Slo:
    """Service level objective, seconds."""

    ttft_s: float = 2.0
    tpot_s: float = 0.2


@dataclass(frozen=True, slots=True)
class Measures:
    """One run. Rates are a second of the time from first arrival to last token."""

    num_requests: int
    duration_s: float
    ttft_s: Summary
    tpot_s: Summary
    itl_s: Summary
    e2el_s: Summary
    output_tok_per_s: float
    total_tok_per_s: float
    requests_per_s: float
    slo_attainment: float


def measure(records: Sequence[RequestRecord], slo: Slo = Slo()) -> Measures:
    """Measures of all finished requests. Raises ValueError without any."""
    if not records:
        raise ValueError("no finished requests to measure")
    duration_s = max(r.last_token_s for r in records) - min(r.arrival_s for r in records)
    outputs = sum(r.num_output_tokens for r in records)
    total = outputs + sum(r.num_prompt_tokens for r in records)
    gaps: list[float] = []
    for record in records:
        if record.token_times_s is not None:
            gaps += np.diff(np.array(record.token_times_s)).tolist()
    return Measures(
        num_requests=len(records),
        duration_s=duration_s,
        ttft_s=Summary.of([r.ttft_s for r in records]),
        tpot_s=Summary.of([t for r in records if (t := r.tpot_s) is not None]),
        itl_s=Summary.of(gaps),
        e2el_s=Summary.of([r.e2el_s for r in records]),
        output_tok_per_s=outputs / duration_s,
        total_tok_per_s=total / duration_s,
        requests_per_s=len(records) / duration_s,
        slo_attainment=slo_attainment(records, slo),
    )


def slo_attainment(records: Sequence[RequestRecord], slo: Slo) -> float:
    """Share of requests that meet TTFT and TPOT both; one token has no TPOT to miss."""
    met = sum(
        r.ttft_s <= slo.ttft_s and (r.tpot_s is None or r.tpot_s <= slo.tpot_s) for r in records
    )
    return met / len(records)


Rule = Callable[[Sequence[RequestRecord]], bool]


def p90_rule(slo: Slo) -> Rule:
    """P90 TTFT and P90 TPOT, each over all requests, meet the SLO."""

    def holds(records: Sequence[RequestRecord]) -> bool:
        ttft = Summary.of([r.ttft_s for r in records]).p90
        tpots = [t for r in records if (t := r.tpot_s) is not None]
        return ttft <= slo.ttft_s and (not tpots or Summary.of(tpots).p90 <= slo.tpot_s)

    return holds


def joint_rule(slo: Slo, share: float) -> Rule:
    """At least `share` of the requests meet both."""
    return lambda records: slo_attainment(records, slo) >= share


def goodput(
    run_at_rate: Callable[[float], Sequence[RequestRecord]],
    rule: Rule,
    lo: float,
    hi: float,
    tolerance: float,
) -> float:
    """Highest rate that keeps `rule`, by bisection to within `tolerance`; a rate that was run.

    Takes the rule to be lost once and for all as the rate grows. `lo` failing gives 0.0, `hi`
    passing gives `hi`: the answer is then only a bound, so widen the range.
    """
    if not (0.0 < lo < hi and tolerance > 0.0):
        raise ValueError(f"lo = {lo}, hi = {hi}, tolerance = {tolerance}: need 0 < lo < hi, > 0")
    if not rule(run_at_rate(lo)):
        return 0.0
    if rule(run_at_rate(hi)):
        return hi
    while hi - lo > tolerance:
        rate = (lo + hi) / 2.0
        if rule(run_at_rate(rate)):
            lo = rate
        else:
            hi = rate
    return lo
