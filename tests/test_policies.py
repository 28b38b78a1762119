"""Chunk and rebalance policies on plain values: no vLLM."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ppbalance.chunk import FixedChunk, GreedyChunk
from vllm_ppbalance.config import Settings
from vllm_ppbalance.rebalance import EvenShare, Off, Threshold
from vllm_ppbalance.state import Decode, LatencyTotals, MicroBatch, PipelineState


def batch(step, decodes, prefill_tokens=0):
    requests = decodes + bool(prefill_tokens)
    prefills = ((prefill_tokens, 0),) if prefill_tokens else ()
    return MicroBatch(step, requests, decodes, decodes, 100 * decodes, prefills, decodes)


def pipeline(cohorts, step=100, **fields):
    """A pipeline of len(cohorts) stages; cohorts[0] is ready, cohorts[i] runs i steps later."""
    pp_size = len(cohorts)
    in_flight = [
        batch(step - pp_size + i, size) for i, size in enumerate(cohorts) if i > 0 and size
    ]
    ready = [Decode(f"r{i}", 100, 5, 0, 0.0) for i in range(cohorts[0])]
    values = {
        "step": step,
        "now_s": 0.0,
        "pp_size": pp_size,
        "max_budget": 8192,
        "min_budget": 1,
        "decode_budget": cohorts[0],
        "num_ready": len(ready),
        "ready": ready,
        "in_flight": in_flight,
        "recent": [batch(step - pp_size, cohorts[0]), *in_flight],
    }
    return PipelineState(**{**values, **fields})


def greedy(**chunk):
    """The greedy rule, past its first step."""
    policy = GreedyChunk(Settings.model_validate({"chunk": chunk}))
    policy.budget(pipeline([4, 4, 4, 4], 1))
    return policy


def feed(policy, ttft_s, gap_s, step, seen, kv_free=1.0, cohorts=(4, 4, 4, 4)):
    """One decision after a window with one first token and one gap; returns the budget."""
    seen.append((ttft_s, gap_s))
    totals = LatencyTotals(sum(t for t, _ in seen), len(seen), sum(g for _, g in seen), len(seen))
    return policy.budget(pipeline(cohorts, step, totals=totals, kv_free=kv_free))


def test_fixed_gives_its_number_or_leaves_vllms():
    assert FixedChunk(777).budget(pipeline([1, 1])) == 777
    assert FixedChunk(None).budget(pipeline([1, 1])) is None


def test_greedy_starts_small_and_grows_by_its_base_while_ttft_is_long():
    policy, seen = greedy(), []
    assert policy.budget(pipeline([4, 4, 4, 4], 100)) == 128
    assert [feed(policy, 0.7, 0.05, 104 + 4 * i, seen) for i in range(3)] == [256, 384, 512]


def test_greedy_knows_nothing_of_latencies_from_before_its_first_step():
    policy, seen = GreedyChunk(Settings()), [(9.0, 0.05)]
    assert feed(policy, 9.0, 0.05, 100, seen) == 128
    assert policy.budget(pipeline([4] * 4, 104, totals=LatencyTotals(18.0, 2, 0.1, 2))) == 128
    assert feed(policy, 0.7, 0.05, 108, seen) == 256


def test_greedy_decides_every_pp_size_steps_only():
    policy, seen = greedy(), []
    assert [feed(policy, 0.7, 0.05, 100 + i, seen) for i in range(6)] == [256] * 4 + [384] * 2


def test_greedy_keeps_its_chunk_between_the_thresholds_and_without_first_tokens():
    policy, seen = greedy(greedy_min_chunk=512), []
    assert feed(policy, 0.4, 0.05, 100, seen) == 512
    assert policy.budget(pipeline([4] * 4, 104, totals=LatencyTotals(0.4, 1, 9.0, 1))) == 512


@pytest.mark.parametrize(("ttft_s", "gap_s"), [(0.7, 0.217), (0.19, 0.05)])
def test_greedy_shrinks_when_token_gaps_are_long_or_ttft_has_room(ttft_s, gap_s):
    policy, seen = greedy(), []
    for i in range(4):
        feed(policy, 0.7, 0.05, 100 + 4 * i, seen)
    assert feed(policy, ttft_s, gap_s, 116, seen) == 512


def test_greedy_grows_only_while_token_gaps_are_safe():
    policy, seen = greedy(), []
    assert feed(policy, 0.7, 0.16, 100, seen) == 256
    assert feed(policy, 0.7, 0.171, 104, seen) == 256


def test_greedy_stays_within_its_bounds():
    policy, seen = greedy(greedy_max_chunk=300), []
    assert [feed(policy, 0.7, 0.05, 100 + 4 * i, seen) for i in range(3)] == [256, 300, 300]
    assert [feed(policy, 0.1, 0.05, 112 + 4 * i, seen) for i in range(3)] == [172, 128, 128]


def test_greedy_runs_small_while_kv_is_short_and_goes_back_afterwards():
    policy, seen = greedy(greedy_min_chunk=1024), []
    cohorts = (70, 80, 90, 100)
    assert feed(policy, 0.7, 0.05, 100, seen, 0.05, cohorts) == 256  # (70 + 64) // 128 + 1
    assert feed(policy, 0.7, 0.05, 104, seen, 0.05, cohorts) == 256
    assert feed(policy, 0.4, 0.05, 108, seen, 0.5, cohorts) == 1024


def test_greedy_chunk_exceeds_the_requests_of_the_fullest_micro_batch():
    assert greedy().budget(pipeline([10, 10, 128, 10])) == 256
    assert greedy().budget(pipeline([10, 10, 127, 10])) == 128


def test_off_holds_nobody():
    assert Off().hold(pipeline([16, 0, 0, 0])) == {}


def test_even_share_caps_at_the_rounded_up_share_of_live_decodes():
    assert len(EvenShare().hold(pipeline([16, 12, 11, 9]))) == 4
    assert len(EvenShare().hold(pipeline([16, 0, 0, 0]))) == 12
    assert EvenShare().hold(pipeline([11, 16, 11, 6])) == {}
    assert EvenShare().hold(pipeline([1, 0, 0, 0])) == {}


def test_even_share_counts_decodes_on_their_way_back():
    assert len(EvenShare().hold(pipeline([8, 0, 0, 0], parked={101: 8}))) == 4


def test_even_share_does_not_count_a_decode_whose_last_token_is_in_flight():
    state = pipeline([8, 4, 4, 4])
    assert len(EvenShare().hold(state)) == 3
    ghosts = pipeline([8, 4, 4, 4], num_ready=10)
    assert len(EvenShare().hold(ghosts)) == 3


def test_holds_fall_on_those_who_were_served_last_and_not_held_before():
    ready = [
        Decode("old", 10, 5, 0, 1.0),
        Decode("fresh", 10, 5, 0, 3.0),
        Decode("held", 10, 5, 1, 4.0),
    ]
    state = pipeline([3, 0, 0], ready=ready)
    assert list(EvenShare().hold(state)) == ["fresh", "old"]


def test_threshold_moves_half_the_difference_to_the_emptiest_cohort():
    holds = Threshold(4).hold(pipeline([16, 12, 11, 9]))
    assert list(holds.values()) == [3, 3, 3]


def test_threshold_holds_nobody_on_a_single_stage():
    assert Threshold(4).hold(pipeline([16])) == {}


def test_threshold_waits_until_the_fullest_cohort_runs():
    assert Threshold(4).hold(pipeline([12, 16, 11, 9])) == {}


def test_threshold_ignores_smaller_differences():
    assert Threshold(4).hold(pipeline([12, 10, 9, 9])) == {}
    assert len(Threshold(3).hold(pipeline([12, 10, 9, 9]))) == 1


def play(policy, cohorts, steps):
    """Run a policy on counts alone: cohorts as a queue, held decodes carried to their step."""
    pp_size, step = len(cohorts), 100
    sizes = {step + i: size for i, size in enumerate(cohorts)}
    ran = []
    for step in range(100, 100 + steps):
        queue = [sizes.get(step + i, 0) for i in range(pp_size)]
        hold = policy.hold(pipeline(queue, step))
        for delay in hold.values():
            sizes[step + delay] = sizes.get(step + delay, 0) + 1
        now = sizes.pop(step, 0) - len(hold)
        sizes[step + pp_size] = sizes.get(step + pp_size, 0) + now
        ran.append(now)
    return ran


@given(st.lists(st.integers(0, 40), min_size=2, max_size=8))
def test_even_share_spreads_any_cohorts_within_two_rounds(cohorts):
    pp_size, total = len(cohorts), sum(cohorts)
    ran = play(EvenShare(), cohorts, 4 * pp_size)
    assert max(ran[2 * pp_size :]) <= -(-total // pp_size)
    assert sum(ran[-pp_size:]) == total


@given(st.lists(st.integers(0, 40), min_size=2, max_size=8), st.integers(1, 8))
def test_threshold_brings_every_difference_under_its_threshold(cohorts, threshold):
    pp_size, total = len(cohorts), sum(cohorts)
    ran = play(Threshold(threshold), cohorts, 40 * pp_size)
    last = ran[-pp_size:]
    assert sum(last) == total
    assert max(last) - min(last) < max(threshold, 2)
