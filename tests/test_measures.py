import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.bubbles import (
    Bubbles,
    Busy,
    Load,
    StageUse,
    bubble_ratio,
    decode_spread,
    stage_use,
)
from bench.measures import (
    RequestRecord,
    Slo,
    Summary,
    goodput,
    joint_rule,
    measure,
    p90_rule,
    slo_attainment,
)
from bench.spans import WorkTime, union


def record(arrival=0.0, ttft=1.0, decode=1.0, outputs=11, prompt=100, times=None):
    first = arrival + ttft
    return RequestRecord("r", arrival, first, first + decode, prompt, outputs, times)


def test_latencies_of_one_request():
    r = record(arrival=2.0, ttft=0.5, decode=1.0, outputs=11)
    assert (r.ttft_s, r.tpot_s, r.e2el_s) == (0.5, 0.1, 1.5)


def test_one_token_has_no_tpot_and_counts_by_ttft_alone():
    quick, slow = record(ttft=1.0, decode=0.0, outputs=1), record(ttft=3.0, decode=0.0, outputs=1)
    assert quick.tpot_s is None
    assert slo_attainment([quick, slow], Slo()) == 0.5


def test_attainment_is_joint():
    late_first = record(ttft=2.5)
    slow_after = record(decode=2.5)
    good = record()
    assert slo_attainment([late_first, slow_after, good, good], Slo()) == 0.5


def test_measures_of_two_requests():
    records = [
        record(arrival=0.0, ttft=1.0, decode=1.0, outputs=3, prompt=7, times=(1.0, 1.25, 2.0)),
        record(arrival=1.0, ttft=1.0, decode=3.0, outputs=5, prompt=5),
    ]
    m = measure(records)
    assert m.duration_s == 5.0
    assert (m.output_tok_per_s, m.total_tok_per_s, m.requests_per_s) == (1.6, 4.0, 0.4)
    assert (m.itl_s.mean, m.tpot_s.mean, m.e2el_s.p50) == (0.5, 0.625, 3.0)
    assert m.slo_attainment == 0.0


def test_no_request_is_an_error_and_no_value_is_nan():
    with pytest.raises(ValueError, match="no finished requests"):
        measure([])
    assert math.isnan(Summary.of([]).p90)


def test_percentiles_interpolate():
    assert Summary.of([float(n) for n in range(11)]) == Summary(5.0, 5.0, 9.0, 9.5, 9.9)


def test_p90_rule_forgives_one_in_ten_where_the_joint_rule_does_too():
    records = [record()] * 10 + [record(ttft=9.0)]
    assert p90_rule(Slo())(records)
    assert joint_rule(Slo(), 0.9)(records)
    assert not joint_rule(Slo(), 0.99)(records)


def test_p90_rule_looks_at_both_latencies_apart():
    """A tenth late, another tenth slow: each P90 holds, the joint share of 0.9 does not."""
    records = [record()] * 18 + [record(ttft=9.0), record(decode=9.0)]
    assert p90_rule(Slo())(records)
    assert not joint_rule(Slo(), 0.95)(records)


@given(st.floats(1.5, 15.5))
def test_goodput_finds_the_rate_where_the_rule_breaks(limit):
    tried = []

    def run(rate):
        tried.append(rate)
        return [record(ttft=1.0 if rate <= limit else 3.0)]

    found = goodput(run, p90_rule(Slo()), 1.0, 16.0, 0.01)
    assert found <= limit < found + 0.01
    assert found in tried


@pytest.mark.parametrize(("limit", "expected"), [(0.5, 0.0), (99.0, 16.0)])
def test_goodput_outside_its_range(limit, expected):
    run = lambda rate: [record(ttft=1.0 if rate <= limit else 3.0)]  # noqa: E731
    assert goodput(run, p90_rule(Slo()), 1.0, 16.0, 0.01) == expected


def test_goodput_refuses_an_empty_range():
    with pytest.raises(ValueError, match=r"lo = 2\.0, hi = 1\.0"):
        goodput(lambda rate: [record()], p90_rule(Slo()), 2.0, 1.0, 0.1)


PREFILL, DECODE = Load(512, 8), Load(0, 8)


def pipeline(services, released):
    """Serve micro-batches first in, first out: each starts when here, and its stage, are ready."""
    free = [0.0] * len(services[0])
    stages = [[] for _ in services[0]]
    for step, service in enumerate(services):
        at = released[step]
        for stage, seconds in enumerate(service):
            start = max(at, free[stage])
            at = free[stage] = start + seconds
            stages[stage].append(Busy(step, start, at))
    return stages


def closed_loop(times, pp_size):
    """Step k is released when step k - P has left; every stage takes times[k]."""
    stages = [[] for _ in range(pp_size)]
    for step, seconds in enumerate(times):
        at = stages[-1][step - pp_size].end_s if step >= pp_size else 0.0
        for rows in stages:
            start = max(at, rows[-1].end_s if rows else 0.0)
            at = start + seconds
            rows.append(Busy(step, start, at))
    return stages


def whole(stages):
    return [(stages[0][0].start_s, stages[-1][-1].end_s)]


def test_equal_steps_leave_only_ramp_and_drain():
    stages = closed_loop([1.0] * 10, 2)
    uses = stage_use(stages, dict.fromkeys(range(10), DECODE), whole(stages))
    assert [use.bubbles for use in uses] == [Bubbles(starved_s=1.0)] * 2
    assert uses[0].busy_share == 10 / 11


@pytest.mark.parametrize(
    ("odd", "even", "part"),
    [
        (PREFILL, PREFILL, "prefill_prefill_s"),
        (PREFILL, DECODE, "prefill_decode_s"),
        (DECODE, DECODE, "decode_decode_s"),
    ],
)
def test_unequal_neighbours_are_named_by_what_they_carry(odd, even, part):
    # 1 s and 3 s in turn on two stages: the round takes 6 s, of which each stage works 4.
    stages = closed_loop([1.0, 3.0] * 5, 2)
    loads = {step: odd if step % 2 else even for step in range(10)}
    uses = stage_use(stages, loads, whole(stages))
    for use in uses:
        assert use.work_s == 5 * 6 + 1
        assert use.busy_s == 20.0
        assert getattr(use.bubbles, part) + use.bubbles.starved_s == 11.0
        assert getattr(use.bubbles, part) >= 8.0


def test_second_stage_waits_for_the_longer_prefill_upstream():
    # Step 1 holds stage 0 from 1 to 4 s; stage 1 is done with step 0 at 2 s.
    stages = pipeline([(1.0, 1.0), (3.0, 3.0)], [0.0, 0.0])
    uses = stage_use(stages, {0: DECODE, 1: PREFILL}, [(0.0, 7.0)])
    assert uses[1].bubbles == Bubbles(prefill_decode_s=2.0, starved_s=1.0)


def test_first_stage_waits_for_the_oldest_to_leave():
    # Two slots: step 2 needs step 0 to leave stage 1 at 4 s, though stage 0 is free from 2 s on.
    stages = pipeline([(1.0, 3.0), (1.0, 1.0), (1.0, 1.0)], [0.0, 0.0, 4.0])
    uses = stage_use(stages, {0: PREFILL, 1: DECODE, 2: DECODE}, [(0.0, 6.0)])
    assert uses[0].bubbles == Bubbles(prefill_decode_s=2.0, starved_s=1.0)


def test_an_empty_slot_is_starvation_on_every_stage():
    # One request alone on three stages: nobody's imbalance.
    stages = pipeline([(1.0, 1.0, 1.0)] * 3, [0.0, 3.0, 6.0])
    uses = stage_use(stages, dict.fromkeys(range(3), DECODE), [(0.0, 9.0)])
    assert [use.bubbles for use in uses] == [Bubbles(starved_s=6.0)] * 3


def test_time_without_any_request_is_no_bubble():
    stages = pipeline([(1.0, 1.0)] * 2, [0.0, 10.0])
    uses = stage_use(stages, dict.fromkeys(range(2), DECODE), [(0.0, 2.0), (10.0, 12.0)])
    assert [use.bubbles for use in uses] == [Bubbles(starved_s=2.0)] * 2


def test_late_host_is_not_imbalance():
    # Step 2 could have started when step 0 left at 2 s; the host gave it out at 2.5 s.
    stages = pipeline([(1.0, 1.0)] * 3, [0.0, 0.0, 2.5])
    uses = stage_use(stages, dict.fromkeys(range(3), DECODE), [(0.0, 4.5)])
    assert uses[0].bubbles == Bubbles(starved_s=0.5 + 1.0)


times = st.lists(st.floats(0.01, 5.0), min_size=3, max_size=3)
worlds = st.lists(
    st.tuples(times, st.floats(0.0, 3.0), st.booleans(), st.integers(0, 3)), min_size=1, max_size=12
)


@given(worlds)
def test_parts_sum_to_all_idle_time_with_work(world):
    released, loads, at = [], {}, 0.0
    for step, (_, wait, prefill, count) in enumerate(world):
        at += wait
        released.append(at)
        loads[step] = Load(64 if prefill else 0, count)
    stages = pipeline([services for services, *_ in world], released)
    work = [(r, rows.end_s) for r, rows in zip(released, stages[-1], strict=True)]
    span_s = WorkTime(work).total_s
    for use, rows in zip(stage_use(stages, loads, work), stages, strict=True):
        busy_s = sum(row.end_s - row.start_s for row in rows)
        assert use.busy_s == pytest.approx(busy_s)
        assert use.bubbles.total_s == pytest.approx(span_s - busy_s, abs=1e-9)
        parts = (
            use.bubbles.prefill_prefill_s,
            use.bubbles.prefill_decode_s,
            use.bubbles.decode_decode_s,
            use.bubbles.starved_s,
        )
        assert min(parts) >= -1e-9


def test_bubble_ratio_weighs_stages_by_time():
    uses = [
        StageUse(10.0, 9.0, Bubbles(decode_decode_s=1.0)),
        StageUse(10.0, 7.0, Bubbles(starved_s=3.0)),
    ]
    assert bubble_ratio(uses) == Bubbles(decode_decode_s=0.05, starved_s=0.15000000000000002)


def test_stages_must_agree_on_order():
    with pytest.raises(ValueError, match="stage 1: must serve"):
        stage_use([[Busy(0, 0, 1)], [Busy(1, 1, 2)]], {}, [])
    with pytest.raises(ValueError, match="stage 0: step 1 starts before step 0 ends"):
        stage_use([[Busy(0, 0, 2), Busy(1, 1, 3)]], {}, [])


def test_overlapping_requests_are_one_span_of_work():
    assert union([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0)]) == [(0.0, 3.0), (5.0, 6.0)]
    work = WorkTime([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0)])
    assert (work.total_s, work.within(2.0, 5.5), work.within(-1.0, 9.0)) == (4.0, 1.5, 4.0)


def test_spread_counts_empty_micro_batches():
    spread = decode_spread([8, 8, 0, 0], 2)
    assert spread.max_minus_min == 4.0  # windows (8, 8) and (8, 0); (0, 0) holds no decode
    assert spread.relative_std == 0.5


def test_even_micro_batches_have_no_spread():
    assert decode_spread([12] * 8, 4) == decode_spread([], 4)
