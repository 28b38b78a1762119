"""Each chunk policy says what its last decision followed from, and equal latency logs changes."""

import logging

import pytest

from tests.test_policies import feed, greedy, pipeline
from tests.test_predictive_policies import LONG, cost_model, policy, prompts


def after(chooser, *states):
    for state in states:
        chooser.budget(state)
    return chooser.reason


@pytest.mark.parametrize("strategy", ["alp", "spread", "equal_latency"])
def test_without_a_model_or_one_to_trust_it_is_a_fallback_and_why(strategy):
    waits = pipeline([0] * 4, **prompts(9000))
    assert after(policy(strategy), waits) == "fallback: there is no cost model"
    flat = after(policy(strategy, cost_model(0.02, 0.0)), waits)
    assert flat == "fallback: 8192 tokens seem to take no longer than 64"


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (prompts(10_000, waited_s=1.0), "demand"),
        (prompts(10_000, waited_s=1.9), "tpot bound"),
        ({}, "nothing waits"),
        ({"kv_free": 0.05, **prompts(100)}, "low kv"),
    ],
)
def test_alp(state, reason):
    assert after(policy("alp", cost_model()), pipeline([0] * 4, **state)) == reason


def test_alp_says_when_no_candidate_keeps_tpot_and_when_all_do():
    urgent = pipeline([0] * 4, **prompts(9000, waited_s=1.9))
    assert after(policy("alp", cost_model(fixed=0.1)), urgent) == "tpot bound: none keeps it"
    easy = policy("alp", cost_model(), alp_slo_tpot_coeff=10.0)
    assert after(easy, urgent) == "largest candidate"


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [(100, "smallest chunk"), (4_000, "backlog"), (10**6, "throughput cap")],
)
def test_spread(tokens, reason):
    state = pipeline([0] * 4, **prompts(tokens))
    assert after(policy("spread", cost_model()), state) == reason


@pytest.mark.parametrize(
    ("tokens", "kv_free", "reason"),
    [
        (0, 1.0, "least prefill"),
        (8_000, 1.0, "backlog"),
        (10**6, 0.5, "kv room"),
        (10**6, 0.05, "kv reserve"),
    ],
)
def test_throttle(tokens, kv_free, reason):
    state = pipeline([0] * 4, kv_free=kv_free, **prompts(tokens))
    assert after(policy("throttle"), state) == reason


@pytest.mark.parametrize(
    ("ttft_s", "gap_s", "kv_free", "reason"),
    [
        (1.0, 0.5, 1.0, "tpot violated"),
        (0.1, 0.1, 1.0, "ttft low"),
        (1.0, 0.1, 1.0, "ttft high"),
        (0.4, 0.1, 1.0, "within bounds"),
        (1.0, 0.1, 0.05, "low kv"),
    ],
)
def test_greedy(ttft_s, gap_s, kv_free, reason):
    chooser = greedy()
    feed(chooser, ttft_s, gap_s, 5, [], kv_free=kv_free)
    assert chooser.reason == reason


def test_greedy_says_when_it_has_nothing_to_go_by():
    assert after(greedy(), pipeline([4] * 4, 9)) == "no first token"


def test_equal_latency():
    alone, company = prompts(50_000, prefix=50_000), prompts(50_000, 10)
    chooser = policy("equal_latency", cost_model(**LONG), equal_first_chunk=4096)
    assert after(chooser, pipeline([0] * 4, **alone)) == "equal latency"
    assert after(chooser, pipeline([0] * 4, **company)) == "in company"
    assert after(chooser, pipeline([0] * 4)) == "no prompt"
    assert after(chooser, pipeline([0] * 4, **prompts(4096 + 192))) == "short rest"


def test_each_change_between_use_and_fallback_is_logged_once(caplog):
    model = cost_model(**LONG)
    chooser = policy("equal_latency", model, equal_first_chunk=4096)
    alone = prompts(50_000, prefix=50_000)
    error, said = [0.0, 0.9, 0.0], []
    with caplog.at_level(logging.INFO, "vllm.ppbalance"):
        for step in range(3000):
            model.trust.mean_error = error[step // 1000]
            chooser.budget(pipeline([0] * 4, step, now_s=0.1 * step, **alone))
            said.append(len(caplog.records))
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 3
    assert "in use, from 4096 tokens on" in texts[0]
    assert "in use" in texts[2]
    assert "every chunk has 4096 tokens" in texts[1]
    assert "off by 90%" in texts[1]
    assert (said[0], said[999], said[1000]) == (1, 1, 2)  # at once when it is no longer to be used


def test_a_model_that_comes_and_goes_does_not_fill_the_log(caplog):
    model = cost_model(**LONG)
    chooser = policy("equal_latency", model, equal_first_chunk=4096)
    with caplog.at_level(logging.INFO, "vllm.ppbalance"):
        for step in range(0, 256 * 200, 256):
            model.trust.mean_error = 0.9 * (step // 256 % 2)
            chooser.budget(pipeline([0] * 4, step, now_s=step / 256, **prompts(50_000)))
    assert 2 <= len(caplog.records) <= 5
