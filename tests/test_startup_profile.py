"""Which prompts are sent at start, on plain values: no vLLM."""

import pytest

from vllm_ppbalance.config import Settings
from vllm_ppbalance.startup_profile import StartupProfile


@pytest.mark.parametrize(("prompt_limit", "kv_tokens"), [(8000, 3), (3, 3), (0, 8000), (0, 0)])
def test_without_room_for_a_token_in_each_micro_batch_nothing_is_measured(prompt_limit, kv_tokens):
    profile = StartupProfile(Settings(), 4, 8192, prompt_limit, kv_tokens)
    assert profile.done
    assert profile.more(None) == []


def test_with_room_for_one_token_each_prompt_has_one():
    profile = StartupProfile(Settings(), 4, 8192, 8000, 4)
    assert {tokens for _, tokens in profile.more(None)} == {1}
