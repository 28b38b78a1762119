"""The schedulers to compare with do what their descriptions say."""

import pytest

from bench.simulate import simulate
from bench.workloads import BenchRequest
from tests.runs import small_spec

pytestmark = pytest.mark.scheduler


def together(count, prompt, output, arrival_s=0.0, prefix="r"):
    return [BenchRequest(f"{prefix}{i}", arrival_s, prompt, output) for i in range(count)]


def shapes(policy, requests, **fields):
    outcome = simulate(small_spec(policy, **fields), requests=requests)
    assert outcome.result["measures"]["num_requests"] == len(requests)
    return [step.shape for step in outcome.run.steps]


def test_stock_keeps_to_its_budget_and_no_other():
    requests = together(4, 1000, 3)
    assert max(s.num_tokens for s in shapes("stock:300", requests)) == 300
    assert max(s.num_tokens for s in shapes("stock", requests)) == 4000
    with pytest.raises(ValueError, match="9000 must be at most max_num_batched_tokens = 8192"):
        simulate(small_spec("stock:9000"), requests=requests)


def test_the_static_cap_splits_one_cohort_and_leaves_prompts_alone():
    requests = together(8, 50, 30)
    stock = shapes("stock", requests, max_num_seqs=8)
    capped = shapes("static_cap", requests, max_num_seqs=8)
    assert max(s.decodes for s in stock) == 8
    assert max(s.decodes for s in capped) == 4
    assert max(len(s.prefills) for s in capped) == 8
    assert {s.decodes for s in capped[4:24]} == {4}


def test_the_static_cap_is_off_where_the_pull_request_is():
    requests = together(8, 50, 10)
    sync = shapes("static_cap", requests, max_num_seqs=8, mode="sync")
    assert max(s.decodes for s in sync) == 8


def test_p_pas_caps_a_step_only_under_pressure():
    decode = together(1, 50, 60, prefix="d")
    two = [*decode, *together(2, 3000, 2, arrival_s=0.1)]
    one = [*decode, *together(1, 6000, 2, arrival_s=0.1)]
    assert max(s.num_tokens for s in shapes("stock", two)) >= 6000
    assert max(s.num_tokens for s in shapes("ppas", one)) >= 6000
    under_pressure = [s for s in shapes("ppas", two) if s.prefills and s.num_tokens > 50]
    # Two prompts: 2,048 tokens; the second alone is no pressure any more.
    assert under_pressure[0].num_tokens == 2048
    nobody_decodes = together(2, 3000, 2)
    assert max(s.num_tokens for s in shapes("ppas", nobody_decodes)) == 6000
