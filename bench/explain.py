"""What held a pipeline back, in words, from a server's step log; and which knob would help."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from bench.bubbles import decode_spread
from bench.step_log import LoggedMicroBatch, StepLog, replayed
from vllm_ppbalance.bubble_estimate import CAUSES
from vllm_ppbalance.metrics import bubble_ratios

SMALL_BUBBLE = 0.03  # share of stage time under which an imbalance is not worth a word
STARVED = 0.2
OFTEN = 0.1  # share of micro-batches
FULL = 0.9  # of the budget
BAD_PREDICTION = 0.25  # mean absolute error, as a share
# The knob that bounds a chunk from above, and the one to turn to make chunks more even.
LARGEST = {
    "fixed": "chunk.fixed_tokens (or --max-num-batched-tokens)",
    "greedy": "chunk.greedy_max_chunk",
    "alp": "chunk.alp_chunk_max",
    "balanced": "chunk.balanced_tpot_ratio",
    "spread": "chunk.spread_tpot_ratio",
    "equal_latency": "chunk.equal_first_chunk",
    "throttle": "chunk.throttle_max_prefill",
}
EVENER = {
    "balanced": "raise chunk.balanced_rounds",
    "spread": "raise chunk.spread_rounds",
    "throttle": "raise chunk.throttle_iterations",
}


@dataclass(frozen=True, slots=True)
class Summary:
    """The log in numbers: seconds, tokens, and shares of 1."""

    seconds: float
    num_batches: int
    bubbles: dict[str, float]  # by cause, of stage time with work
    decodes: float  # mean of micro-batches that carry any
    decode_spread: float  # widest minus narrowest of pp_size micro-batches in a row
    ttft_s: float | None
    gap_s: float | None
    prefill_tokens: float  # mean of micro-batches that carry prefill
    with_prefill: float
    waiting: float  # micro-batches with requests not yet admitted
    full: float  # of the micro-batches that leave prompt tokens waiting: at their budget
    low_kv: float
    prediction_error: float | None
    reasons: dict[str, float]


@dataclass(frozen=True, slots=True)
class Finding:
    """`weight` orders findings: lost share of stage time, or how far over a target."""

    weight: float
    words: str
    advice: str


def summarise(log: StepLog) -> Summary:
    """The numbers that the findings rest on."""
    batches, first, last = log.batches, log.batches[0], log.batches[-1]
    *_, (_, estimate) = replayed(log)
    prefills = [b.shape.prefill_tokens for b in batches if b.prefills]
    left = [b for b in batches if b.waiting_tokens and b.budget]
    predicted = [b for b in batches if b.clear and b.predicted_s and b.stage_s > 0.0]
    kv_threshold = log.settings["chunk"]["kv_free_threshold"]
    reasons = Counter(b.reason for b in batches)
    return Summary(
        last.done_s - first.submitted_s,
        len(batches),
        bubble_ratios(dict(zip(CAUSES, estimate.idle_s, strict=True)), estimate.work_s),
        fmean(decodes) if (decodes := [b.decodes for b in batches if b.decodes]) else 0.0,
        decode_spread(list(_decodes(batches)), log.pp_size).max_minus_min,
        _mean(last.ttft_s - first.ttft_s, last.first_tokens - first.first_tokens),
        _mean(last.gap_s - first.gap_s, last.gaps - first.gaps),
        fmean(prefills) if prefills else 0.0,
        len(prefills) / len(batches),
        sum(b.waiting > 0 for b in batches) / len(batches),
        _mean(sum(b.shape.num_tokens >= FULL * (b.budget or 0) for b in left), len(left)) or 0.0,
        sum(b.kv_free < kv_threshold for b in batches) / len(batches),
        _mean(
            sum(abs((b.predicted_s or 0.0) / b.stage_s - 1.0) for b in predicted), len(predicted)
        ),
        {reason: count / len(batches) for reason, count in reasons.most_common()},
    )


def _mean(total: float, count: int) -> float | None:
    return total / count if count else None


def _decodes(batches: list[LoggedMicroBatch]) -> Iterator[int]:
    """Decodes by step, empty micro-batches, which leave no line, as 0."""
    for before, batch in pairwise(batches):
        yield before.decodes
        yield from [0] * min(batch.step - before.step - 1, 64)
    yield batches[-1].decodes


def findings(log: StepLog, summary: Summary) -> list[Finding]:
    """What held the pipeline back, the heaviest first; empty where nothing did."""
    found = [
        *_slo(log.settings, summary),
        *_imbalance(log.settings, summary),
        *_shortage(log, summary),
        *_health(log, summary),
    ]
    return sorted(found, key=lambda finding: -finding.weight)


def _slo(settings: Any, summary: Summary) -> Iterator[Finding]:
    largest = LARGEST.get(settings["chunk"]["strategy"], "the largest chunk")
    ttft, gap = summary.ttft_s or 0.0, summary.gap_s or 0.0
    late, slow = ttft / settings["slo_ttft"] - 1.0, gap / settings["slo_tpot"] - 1.0
    if late > 0.0 and slow > 0.0:
        yield Finding(
            late + slow,
            f"mean TTFT {ttft:.2f} s and mean token gap {1e3 * gap:.0f} ms both miss their "
            "targets: there is more load than the GPUs can serve in time",
            "send fewer requests to this server, or relax slo_ttft or slo_tpot",
        )
    elif late > 0.0:
        how = f"{summary.full:.0%} of the micro-batches that left prompt tokens waiting were full"
        advice = f"raise {largest}" if summary.full > 0.5 else "raise --max-num-seqs"
        yield Finding(late, f"mean TTFT {ttft:.2f} s misses slo_ttft; {how}", advice)
    elif slow > 0.0:
        how = f"{summary.with_prefill:.0%} of the micro-batches carry prompts, "
        how += f"{summary.prefill_tokens:.0f} tokens on average"
        advice = f"lower {largest}" if summary.with_prefill > OFTEN else "lower --max-num-seqs"
        yield Finding(slow, f"mean token gap {1e3 * gap:.0f} ms misses slo_tpot; {how}", advice)


def _imbalance(settings: Any, summary: Summary) -> Iterator[Finding]:
    chunk, rebalance = settings["chunk"]["strategy"], settings["rebalance"]["strategy"]
    evener = EVENER.get(chunk)
    if chunk in ("fixed", "equal_latency"):
        evener = "set chunk.strategy to spread, which evens prompts out over the micro-batches"
    evener = evener or f"lower {LARGEST.get(chunk, 'the largest chunk')}"
    texts = {
        "prefill_decode": "micro-batches with prompt tokens run beside ones that only decode",
        "prefill_prefill": "neighbouring micro-batches carry different amounts of prompt tokens",
    }
    for cause, text in texts.items():
        if (share := summary.bubbles.get(cause, 0.0)) > SMALL_BUBBLE:
            words = f"{share:.0%} of stage time idle because {text} "
            words += f"({summary.prefill_tokens:.0f} tokens on average where there are any)"
            yield Finding(share, words, evener)
    if (share := summary.bubbles.get("decode_decode", 0.0)) > SMALL_BUBBLE:
        advice = "set rebalance.strategy to auto, which goes by predicted time"
        if rebalance == "off":
            advice = "set rebalance.strategy to even_share"
        elif rebalance == "threshold":
            advice = "lower rebalance.delay_threshold"
        elif rebalance == "auto":
            advice = "lower rebalance.margin"
        words = f"{share:.0%} of stage time idle because decodes are unequal: the fullest "
        words += f"micro-batch of a round has {summary.decode_spread:.1f} more than the emptiest"
        yield Finding(share, words, advice)


def _shortage(log: StepLog, summary: Summary) -> Iterator[Finding]:
    starved = summary.bubbles.get("starved", 0.0)
    if starved > STARVED:
        words = f"{starved:.0%} of stage time idle because fewer than {log.pp_size} micro-batches "
        words += "had work"
        advice = "nothing to tune: this server has room for more requests"
        if summary.waiting > 0.5:
            advice = "requests wait all the same: raise --max-num-seqs"
        elif summary.decodes >= log.pp_size and log.settings["rebalance"]["strategy"] == "off":
            words += f", while the others had {summary.decodes:.0f} decodes each"
            advice = "set rebalance.strategy to even_share"
        yield Finding(starved, words, advice)
    if summary.low_kv > OFTEN:
        words = f"the KV cache was nearly full in {summary.low_kv:.0%} of the micro-batches"
        advice = "raise --gpu-memory-utilization, or lower --max-num-seqs"
        yield Finding(summary.low_kv, words, advice)


def _health(log: StepLog, summary: Summary) -> Iterator[Finding]:
    if (error := summary.prediction_error or 0.0) > BAD_PREDICTION:
        words = f"predicted stage times are off by {error:.0%} on average"
        yield Finding(error, words, "measure this deployment anew: profiling.mode always, once")
    if (share := summary.reasons.get("no_model", 0.0)) > OFTEN:
        words = f"{share:.0%} of the decisions had no cost model to trust"
        yield Finding(share, words, "let it be measured at an idle start: profiling.mode auto")
    if log.dropped:
        words = f"{log.dropped} records are missing: the disk did not keep up"
        yield Finding(0.0, words, "write the log to a faster disk")
