"""Cohort bookkeeping: joins, finishes, aborts, preemptions, holds, both cadences."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from vllm_ppbalance.apply import release_if_empty
from vllm_ppbalance.cohorts import Cohorts
from vllm_ppbalance.state import MicroBatch


def run(cohorts, step, ids):
    batch = MicroBatch(step, len(ids), len(ids), len(ids), 100 * len(ids), (), len(ids))
    cohorts.scheduled(batch, set(ids), set(), set())


def test_by_step_a_decode_is_ready_pp_size_steps_after_it_ran():
    cohorts = Cohorts(3, by_step=True)
    cohorts.begin_step(1, ())
    run(cohorts, 1, ["a"])
    for step in (2, 3):
        cohorts.begin_step(step, ())
        assert cohorts.ready == set()
    cohorts.begin_step(4, ())
    assert cohorts.ready == {"a"}


def test_by_completion_a_decode_is_ready_when_its_micro_batch_is_done():
    cohorts = Cohorts(3, by_step=False)
    run(cohorts, 1, ["a"])
    cohorts.begin_step(7, ())
    assert cohorts.ready == set()
    cohorts.completed(1)
    assert cohorts.ready == {"a"}


def test_a_request_that_finished_in_flight_does_not_come_back():
    for by_step in (True, False):
        cohorts = Cohorts(2, by_step=by_step)
        run(cohorts, 1, ["a", "b"])
        cohorts.completed(1)
        cohorts.begin_step(3, {"a"})
        assert cohorts.ready == {"b"}


def test_a_held_decode_returns_at_its_step_and_forgets_its_holds_when_it_runs():
    cohorts = Cohorts(4, by_step=False)
    cohorts.ready = {"a", "b"}
    cohorts.hold({"a": 2}, step=10)
    assert (cohorts.ready, cohorts.parked_counts()) == ({"b"}, {12: 1})
    cohorts.begin_step(11, ())
    assert "a" not in cohorts.ready
    cohorts.begin_step(12, ())
    assert "a" in cohorts.ready
    assert cohorts.holds_in_a_row == {"a": 2}
    run(cohorts, 12, ["a"])
    assert cohorts.holds_in_a_row == {}


def test_abort_of_a_held_decode_leaves_nothing_behind():
    cohorts = Cohorts(4, by_step=False)
    cohorts.ready = {"a"}
    cohorts.hold({"a": 3}, step=10)
    cohorts.begin_step(11, {"a"})
    assert (cohorts.ready, cohorts.parked_counts(), cohorts.holds_in_a_row) == (set(), {}, {})


def test_a_preempted_decode_is_out_until_it_runs_again():
    cohorts = Cohorts(2, by_step=False)
    cohorts.ready = {"held"}
    cohorts.hold({"held": 1}, step=5)
    run(cohorts, 5, ["flying"])
    assert cohorts.forget("held") is True
    assert cohorts.forget("flying") is False
    run(cohorts, 6, ["flying"])
    cohorts.completed(5)
    cohorts.begin_step(7, ())
    assert cohorts.ready == set()
    cohorts.completed(6)
    assert cohorts.ready == {"flying"}


def test_micro_batches_in_flight_are_those_of_the_other_cohorts():
    cohorts = Cohorts(3, by_step=True)
    for step in range(1, 5):
        cohorts.begin_step(step, ())
        run(cohorts, step, ["a"] if step % 2 else ["b"])
    cohorts.begin_step(5, ())
    assert [batch.step for batch in cohorts.in_flight] == [3, 4]
    assert [batch.step for batch in cohorts.recent] == [2, 3, 4]


def test_a_prompt_that_ends_joins_the_decodes_it_ran_with():
    cohorts = Cohorts(2, by_step=True)
    cohorts.ready = {"a", "b"}
    batch = MicroBatch(1, 4, 2, 2, 200, ((9, 0), (8, 0)), 3)
    cohorts.scheduled(batch, {"a", "b", "new", "half"}, {"new", "half"}, {"new"})
    assert cohorts.ready == set()
    cohorts.begin_step(3, ())
    assert cohorts.ready == {"a", "b", "new"}


def test_an_unknown_decode_is_known_once_the_numbers_differ():
    """One left on a way nobody told of while another came: as many are ready as run."""
    cohorts = Cohorts(2, by_step=True)
    cohorts.ready = {"a", "gone"}
    run(cohorts, 1, ["a", "came"])
    cohorts.begin_step(3, ())
    cohorts.ready.intersection_update({"a", "came"})  # as the scheduler does now and then
    run(cohorts, 3, ["a", "came"])
    cohorts.begin_step(5, ())
    assert cohorts.ready == {"a", "came"}


EVENTS = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from(["run", "hold", "abort", "preempt"])),
    max_size=60,
)


@given(EVENTS, st.integers(2, 5), st.booleans())
def test_every_live_decode_is_in_exactly_one_place(events, pp_size, by_step):
    """Ready, held, in flight, or preempted: whatever happens, never two and never none."""
    cohorts = Cohorts(pp_size, by_step=by_step)
    live = {f"r{i}" for i in range(5)}
    preempted: set[str] = set()
    newest = dict.fromkeys(live, 0)  # the last micro-batch each ran in; gone when it is done
    run(cohorts, 0, sorted(live))
    aborted: set[str] = set()
    for step, (index, event) in enumerate(events, start=1):
        cohorts.completed(step - pp_size)
        newest = {r: ran for r, ran in newest.items() if ran > step - pp_size}
        cohorts.begin_step(step, aborted)
        aborted = set()
        request_id = f"r{index}"
        if event == "hold" and request_id in cohorts.ready:
            cohorts.hold({request_id: 1 + index % (pp_size - 1)}, step)
        elif event == "preempt" and request_id in live:
            cohorts.forget(request_id)
            preempted.add(request_id)
            newest.pop(request_id, None)
        elif event == "run":
            ran = set(cohorts.ready) | ({request_id} & preempted & live)
            preempted -= ran
            newest.update(dict.fromkeys(ran, step))
            if ran:
                run(cohorts, step, ran)
        places = [cohorts.ready, *cohorts.parked.values(), preempted, newest.keys()]
        for member in live:
            assert sum(member in place for place in places) == 1, (step, member, event)
        if event == "abort" and request_id in live:
            live.discard(request_id)
            preempted.discard(request_id)
            newest.pop(request_id, None)
            aborted.add(request_id)


def test_released_decodes_are_ready_at_once_and_nothing_stays_behind():
    cohorts = Cohorts(4, by_step=True)
    run(cohorts, 1, ["a", "b", "c"])
    cohorts.begin_step(5, ())
    cohorts.hold({"a": 2, "b": 3}, 5)
    run(cohorts, 5, ["c"])
    cohorts.begin_step(6, ["c"])
    assert cohorts.release() == {7: {"a"}, 8: {"b"}}
    assert cohorts.ready == {"a", "b"}
    assert cohorts.parked == {}
    assert cohorts.release() == {}


def test_a_session_that_has_gone_on_is_not_released_sooner_than_vllm_asks():
    """It was held until 7 when its turn ended; its next prompt ran in step 5: it decodes in 9."""
    cohorts = Cohorts(4, by_step=True)
    run(cohorts, 1, ["a", "b"])
    cohorts.begin_step(5, ())
    cohorts.hold({"a": 2, "b": 2}, 5)
    requests = {name: decode(eligible) for name, eligible in (("a", 9), ("b", 7))}
    release_if_empty(requests, cohorts, 6)
    assert requests["a"].next_decode_eligible_step == 9
    assert requests["b"].next_decode_eligible_step == 6


def decode(eligible):
    return SimpleNamespace(next_decode_eligible_step=eligible)
