"""Who of the waiting requests goes first: on plain values, no vLLM."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from vllm_ppbalance.admission import EASY_ROUNDS, NO_CHANGE, OnTimeFirst, Pace
from vllm_ppbalance.config import Settings

PACE = Pace(tokens_s=1000.0, through_s=0.0, ahead=0)  # the target is 2 s: 2,000 tokens


def queue(*lengths, arrival_s=0.0, late_share=0.25):
    policy = OnTimeFirst(Settings.model_validate({"admission": {"late_share": late_share}}))
    for index, tokens in enumerate(lengths):
        policy.arrived(f"r{index}", tokens, arrival_s)
    return policy


def test_the_queue_stays_as_it_is_while_all_can_be_in_time():
    assert queue(500, 500, 1000).order(PACE, 0.0, 0) is NO_CHANGE


def test_nobody_asks_for_the_pace_while_all_are_in_time_at_half_of_the_last_one():
    policy = queue(500, 400)
    assert not policy.at_ease(900, 0.0, 0)  # no pace is known yet
    assert policy.order(PACE, 0.0, 0) is NO_CHANGE
    assert policy.at_ease(900, 0.1, 0)
    assert not policy.at_ease(900, 0.3, 0)  # 1.8 s at half the pace
    assert not policy.at_ease(1100, 0.0, 0)  # admitted ones come first
    policy.left(["r0", "r1"])
    assert policy.at_ease(5000, 9.0, 0)  # nobody waits


def test_the_pace_is_asked_for_again_after_some_rounds():
    policy = queue(500)
    policy.order(PACE, 0.0, 0)
    assert [policy.at_ease(500, 0.0, 0) for _ in range(EASY_ROUNDS + 1)].count(True) == EASY_ROUNDS
    policy.order(PACE, 0.0, 0)
    assert policy.at_ease(500, 0.0, 0)


def test_who_was_put_off_is_looked_after_every_round():
    policy = queue(5000, 100)
    policy.order(PACE, 0.0, 0)
    assert policy.num_late == 1
    assert not policy.at_ease(0, 0.0, 0)


def test_rounds_at_ease_give_the_late_no_credit():
    """What was computed before anyone was late is nobody's share."""
    policy = queue(400)
    policy.order(PACE, 0.0, computed=0)
    assert policy.at_ease(400, 0.0, computed=50_000)
    policy.arrived("long", 5000, 0.0)
    assert policy.order(PACE, 0.0, computed=50_000).last == ("long",)
    assert policy.order(PACE, 0.1, computed=50_400) is NO_CHANGE


def test_the_longest_is_put_off_when_one_has_to_be():
    assert queue(500, 1500, 400).order(PACE, 0.0, 0).last == ("r1",)


def test_what_cannot_be_in_time_at_all_is_put_off():
    policy = queue(100, 5000)
    assert policy.order(PACE, 0.0, 0).last == ("r1",)
    assert policy.num_late == 1


def test_admitted_prompts_come_before_everyone():
    assert queue(1000, 900).order(PACE._replace(ahead=500), 0.0, 0).last == ("r0",)


def test_prefix_cache_hits_count_as_less_work():
    assert queue(2000, 2000).order(PACE._replace(uncached=0.5), 0.0, 0) is NO_CHANGE


def test_a_newcomer_goes_before_those_put_off():
    policy = queue(5000)
    policy.order(PACE, 0.0, 0)
    assert policy.order(PACE, 0.0, 0) is NO_CHANGE
    policy.arrived("new", 100, 0.0)
    assert policy.order(PACE, 0.0, 0).last == ("r0",)


def test_those_put_off_get_their_share_of_what_is_computed_oldest_first():
    policy = queue(4000, 4000)
    policy.order(PACE, 0.0, computed=0)
    assert policy.order(PACE, 1.0, computed=15_999) is NO_CHANGE
    assert policy.order(PACE, 2.0, computed=16_000).first == ("r0",)
    assert policy.order(PACE, 3.0, computed=32_000).first == ("r1",)


def test_who_is_behind_already_is_not_moved_again():
    policy = queue(4000, 4000, 4000)
    policy.order(PACE, 0.0, computed=0)
    assert policy.order(PACE, 2.0, computed=16_000) == (("r0",), (), 3)
    policy.arrived("new", 100, 2.0)
    assert policy.order(PACE, 3.0, computed=32_000) == (("r1",), ("r2",), 2)


def test_those_who_left_are_forgotten():
    policy = queue(5000, 5000)
    policy.order(PACE, 0.0, 0)
    policy.left(["r0", "r1", "unknown"])
    assert policy.num_late == 0
    assert policy.order(PACE, 0.0, 10**6) is NO_CHANGE


@given(st.lists(st.tuples(st.integers(1, 900), st.floats(0, 2)), min_size=1, max_size=7))
def test_as_few_are_late_as_can_be(jobs):
    policy = OnTimeFirst(Settings())
    jobs = sorted(jobs, key=lambda job: job[1])
    for index, (tokens, arrival_s) in enumerate(jobs):
        policy.arrived(str(index), tokens, arrival_s)
    policy.order(PACE, 2.0, 0)

    def in_time(chosen):
        done = 2.0
        for tokens, arrival_s in chosen:
            done += tokens / 1000.0
            if done > arrival_s + 2.0 + 1e-9:
                return False
        return True

    most = max(n for n in range(len(jobs) + 1) if any(map(in_time, combinations(jobs, n))))
    assert len(jobs) - policy.num_late == most


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=30), st.integers(0, 3))
def test_everyone_is_served_though_newcomers_never_end(lengths, seed):
    """At the end of a queue into which a short prompt comes for each that is computed."""
    policy = queue(*lengths)
    waiting = {f"r{index}": tokens for index, tokens in enumerate(lengths)}
    order, computed, now_s = list(waiting), 0, float(seed)
    for number in range(20 * sum(lengths) // 100 + 100 * len(lengths)):
        change = policy.order(PACE, now_s, computed)
        moved = {*change.first, *change.last}
        rest = [r for r in order if r not in moved]
        order = [*change.first, *rest, *change.last]
        served = order.pop(0)
        policy.left([served])
        computed += waiting.pop(served)
        now_s += 0.1
        if not any(r.startswith("r") for r in order):
            return
        waiting[f"n{number}"] = 100
        order.append(f"n{number}")
        policy.arrived(f"n{number}", 100, now_s)
    raise AssertionError(f"{[r for r in order if r.startswith('r')]} still wait")
