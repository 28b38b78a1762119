"""The controller keeps whatever a policy says within what is safe."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ppbalance.config import Settings
from vllm_ppbalance.controller import Controller
from vllm_ppbalance.state import Decode, PipelineState


def controller(pp_size=4, budget=None, hold=None, ready=()):
    own = Controller(Settings(), pp_size, "completion")
    own.cohorts.ready = set(ready)
    own.chunk = type("Chunk", (), {"budget": lambda self, state: budget})()
    own.rebalance = type("Hold", (), {"hold": lambda self, state: hold or {}})()
    return own


def state(ready=(), step=10, pp_size=4, low=8, high=2048):
    decodes = [Decode(request_id, 100, 5, 0, 0.0) for request_id in ready]
    return PipelineState(step, 0.0, pp_size, high, low, len(decodes), len(decodes), decodes)


@pytest.mark.parametrize(("asked", "given"), [(None, 2048), (1, 8), (500, 500), (10**9, 2048)])
def test_the_budget_stays_between_its_floor_and_vllms_own(asked, given):
    assert controller(budget=asked).decide(state()).budget == given


def test_never_all_that_could_run_is_held():
    ready = ["a", "b", "c"]
    own = controller(hold=dict.fromkeys(ready, 1), ready=ready)
    assert len(own.decide(state(ready)).hold) == 2


def test_a_lone_decode_is_never_held():
    own = controller(hold={"a": 1}, ready=["a"])
    assert own.decide(state(["a"])).hold == {}


@pytest.mark.parametrize("steps", [0, -1, 4, 99])
def test_a_hold_outside_one_to_pp_size_minus_one_steps_is_dropped(steps):
    own = controller(hold={"a": steps}, ready=["a", "b"])
    assert own.decide(state(["a", "b"])).hold == {}


def test_who_is_not_ready_is_not_held():
    own = controller(hold={"x": 1}, ready=["a", "b"])
    assert own.decide(state(["a", "b"])).hold == {}


def test_without_cohorts_nobody_is_held():
    own = Controller(Settings.model_validate({"rebalance": {"strategy": "even_share"}}), 4, "none")
    own.cohorts.ready = {"a", "b"}
    assert own.decide(state(["a", "b"])).hold == {}


@given(
    st.integers(2, 8),
    st.lists(st.dictionaries(st.sampled_from("abcdef"), st.integers(-1, 9)), max_size=40),
)
def test_nobody_is_held_for_pp_size_steps_in_a_row(pp_size, plans):
    """Whatever a policy asks, a decode that could run does so within pp_size steps."""
    everyone = set("abcdef")
    own = controller(pp_size)
    own.cohorts.ready = set(everyone)
    could_run_at = dict.fromkeys(everyone, 0)
    for step, plan in enumerate(plans):
        own.cohorts.begin_step(step, ())
        ready = sorted(own.cohorts.ready)
        own.rebalance = type("Hold", (), {"hold": lambda self, state, plan=plan: plan})()
        held = own.decide(state(ready, step, pp_size)).hold
        ran = set(ready) - set(held)
        assert ran or not ready
        for request_id in ran:
            assert step - could_run_at[request_id] <= pp_size - 1
            could_run_at[request_id] = step + 1
            own.cohorts.holds_in_a_row.pop(request_id, None)
