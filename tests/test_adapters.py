"""More LoRA adapters than a micro-batch holds: vLLM's real schedulers in virtual time."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from bench.engine_types import RequestSpec
from tests.worlds import ASYNC, SYNC, serve, settings
from vllm_ppbalance.adapters import keep_within

pytestmark = pytest.mark.scheduler
each_mode = pytest.mark.parametrize("mode", [SYNC, ASYNC], ids=["sync", "async-v2"])
ADAPTERS = 4


def adapter(name):
    return 1 + int(name[1:]) % ADAPTERS


def load(prompt=8, count=24):
    return [
        RequestSpec(f"r{i}", 0.004 * i, prompt, 30, lora_id=adapter(f"r{i}")) for i in range(count)
    ]


def served(requests, mode, max_loras, **own):
    ran = serve(requests, pp_size=4, max_loras=max_loras, additional_config=settings(**own), **mode)
    stock = serve(requests, stock=True, pp_size=4, max_loras=ADAPTERS, **mode)
    assert not ran.scheduler.ppbalance_failed
    assert ran.tokens == stock.tokens
    return ran


def most_adapters(ran):
    return max(len({adapter(name) for name in rows}) for rows in ran.rows)


@each_mode
@pytest.mark.parametrize("max_loras", [1, 2])
@pytest.mark.parametrize("rebalance", ["even_share", "threshold"])
def test_decodes_are_not_moved_to_where_their_adapter_has_no_room(rebalance, max_loras, mode):
    ran = served(load(), mode, max_loras, rebalance=rebalance)
    assert most_adapters(ran) == max_loras


@each_mode
@pytest.mark.parametrize("max_loras", [1, 2])
def test_a_chunk_waits_for_a_micro_batch_with_room_for_its_adapter(max_loras, mode):
    ran = served(load(prompt=100), mode, max_loras, chunk="fixed", fixed_tokens=32)
    assert most_adapters(ran) == max_loras


@each_mode
def test_with_room_for_all_adapters_decodes_are_moved_as_ever(mode):
    ran = served(load(), mode, ADAPTERS, rebalance="even_share")
    assert ran.scheduler.ppbalance.num_moves > 0


def running(adapter, step=7, tokens=11):
    lora = SimpleNamespace(lora_int_id=adapter) if adapter else None
    return SimpleNamespace(
        lora_request=lora,
        next_decode_eligible_step=step,
        num_tokens_with_spec=tokens,
        num_output_placeholders=0,
        num_computed_tokens=10,
    )


def test_the_oldest_go_first_and_the_others_ask_again_in_the_next_step():
    """Those in flight, or held until later, take no room; a model without adapter needs none."""
    requests = [running(1, tokens=10), running(2, step=8), running(3), running(0), running(4)]
    requests += [running(3), running(1)]
    assert not keep_within(2, requests, 7)
    assert [r.next_decode_eligible_step for r in requests] == [7, 8, 7, 7, 7, 7, 8]
    assert keep_within(4, requests, 7)
