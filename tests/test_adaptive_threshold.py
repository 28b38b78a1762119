"""`--long-prefill-token-threshold-adaptive`: vLLM's real schedulers in virtual time."""

from itertools import pairwise

import pytest

pytest.importorskip("vllm")

import vllm

from bench.engine_types import RequestSpec
from tests.worlds import ASYNC, SYNC, batch_of, serve, settings
from vllm_ppbalance import Scheduler

pytestmark = [
    pytest.mark.scheduler,
    pytest.mark.skipif(vllm.__version__.startswith("0.23."), reason="vLLM 0.23 has no such flag"),
]
each_mode = pytest.mark.parametrize("mode", [SYNC, ASYNC], ids=["sync", "async-v2"])


def adaptive(**options):
    scheduler = Scheduler(**options)
    scheduler.adaptive_long_prefill_threshold = True
    return scheduler


@each_mode
def test_a_decode_behind_a_long_prompt_goes_on_when_the_prompts_share_grows(mode):
    """Beside 15 others its chunk has 128 tokens, and the decode comes in; beside one up to 1024."""
    long, decode = RequestSpec("p", 0.0, 8000, 2), RequestSpec("d", 0.001, 8, 60)
    short = batch_of(14, prompt=8, max_tokens=3, arrival_s=0.001)
    ran = serve(
        [long, decode, *short],
        ours=adaptive,
        pp_size=4,
        long_prefill_token_threshold=64,
        additional_config=settings(chunk="fixed", fixed_tokens=512),
        **mode,
    )
    assert not ran.scheduler.ppbalance_failed
    times_s = ran.result.requests["d"].token_times_s
    assert len(times_s) == 60
    assert max(after - before for before, after in pairwise(times_s)) < 0.1
