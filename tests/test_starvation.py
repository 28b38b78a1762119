"""No request starves: random arrivals, aborts and preemptions, for as many steps as asked for.

SOAK_STEPS (policy steps) and SOAK_SCHEDULER_STEPS (of vLLM's real scheduler)
make the soak as long as wanted: a million and 100,000 outside CI.
"""

import os
import random
from itertools import count

import pytest

from tests.decode_world import Served, World
from tests.test_rebalance import TILED_S, cost_model
from vllm_ppbalance.base_table import BaseTable
from vllm_ppbalance.config import Settings
from vllm_ppbalance.cost_model import CostModel

POLICY_STEPS = int(os.environ.get("SOAK_STEPS", "24000"))
SCHEDULER_STEPS = int(os.environ.get("SOAK_SCHEDULER_STEPS", "3000"))
STRATEGIES = ("auto", "tiered", "even_share", "threshold")
MOST_ALIVE = 150
UNIT = 16  # a small tile, so that few requests are over it


def tiled_s(tokens, prefills, decodes, context):
    return 2e-3 + TILED_S * -(-tokens // UNIT) + 1e-8 * context


def smooth_s(tokens, prefills, decodes, context):
    return 2e-3 + 1e-4 * tokens + 1e-8 * context


def endless(rng, rate):
    """Requests for ever; now and then a burst of them at once."""
    now_s = 0.0
    for i in count():
        if rng.random() > 0.2:
            now_s += rng.expovariate(rate)
        yield Served(f"r{i}", now_s, rng.randint(1, 200), rng.randint(1, 120))


class Soak(World):
    """A world in which requests are aborted and preempted at random."""

    def __init__(self, settings, pp_size, stage, rng, rate, model):
        self.source, self.rng = endless(rng, rate), rng
        super().__init__(settings, pp_size, stage, [], chunk=256, model=model)
        self.newest = next(self.source)
        self.aborts = self.preemptions = self.num_held = 0

    def one_step(self):
        if not self.step % 100:
            self.most_alive = self.rng.randint(2, MOST_ALIVE)
        room = self.most_alive - len(self.alive) - len(self.queue) - len(self.arrivals)
        while self.newest.arrival_s <= self.clock.now_s and room > 0:
            room -= 1
            self.arrivals.append(self.newest)
            self.newest = next(self.source)
        if not (self.arrivals or self.queue or self.alive):  # idle until the next one comes
            self.arrivals.append(self.newest)
            self.newest = next(self.source)
        if self.alive and self.rng.random() < 0.02:
            self.aborts += 1
            self.drop(self.rng.choice(list(self.alive.values())))
        super().one_step()
        self.num_held += len(self.held)
        self.check()
        self.ended.clear()

    def disturb(self):
        ready = self.own.cohorts.ready
        if ready and self.rng.random() < 0.02:
            self.preemptions += 1
            self.preempt(self.alive[self.rng.choice(sorted(ready))])

    def check(self):
        """Nobody waits for a round, not all are held, nobody who left is remembered."""
        own, longest = self.own, self.pp_size - 1
        assert self.sizes.pop() or not self.held
        assert max(own.cohorts.holds_in_a_row.values(), default=0) <= longest
        if not self.step % 50:
            assert own.cohorts.holds_in_a_row.keys() <= self.alive.keys() | self.gone
            parked = set().union(*own.cohorts.parked.values())
            assert parked <= self.alive.keys() | self.gone
            assert max((r.longest_wait for r in self.alive.values()), default=0) <= longest


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("pp_size", [2, 4, 8])
def test_nobody_starves(strategy, pp_size):
    """Each combination takes its share of the steps, half of them with tiles."""
    steps = POLICY_STEPS // (2 * 3 * len(STRATEGIES))
    knobs = {"base_unit": UNIT} if strategy == "tiered" else {}
    settings = Settings.model_validate(
        {"chunk": {"strategy": "fixed"}, "rebalance": {"strategy": strategy, **knobs}}
    )
    for stage, model in ((smooth_s, cost_model(2e-3, 1e-4, context=1e-8)), (tiled_s, small_tile())):
        rng = random.Random(f"{strategy} {pp_size} {stage.__name__}")
        rate = {2: 90.0, 4: 60.0, 8: 45.0}[pp_size]
        soak = Soak(settings, pp_size, stage, rng, rate, model)
        for _ in range(steps):
            soak.one_step()
        assert soak.aborts > steps / 250
        assert soak.preemptions > steps / 200
        assert soak.num_held > steps / 100
        remembered = getattr(soak.own.rebalance, "_fairness", None)
        if remembered is not None:
            assert len(remembered._free_at) < 5 * MOST_ALIVE


def small_tile():
    """A model that knows the steps of `tiled_s`."""
    sizes = (1, 1024, 8192)
    table = BaseTable(sizes, [2e-3 + 1e-8 * n for n in sizes], UNIT, TILED_S)
    return CostModel(table, profiled=True)


def restless(seed, count):
    """Random lengths and arrivals, a fifth of them at once, a tenth aborted."""
    rng, now_s = random.Random(seed), 0.0
    for i in range(count):
        if rng.random() > 0.2:
            now_s += rng.expovariate(120.0)
        abort_s = now_s + rng.uniform(0.01, 1.0) if rng.random() < 0.1 else None
        yield {
            "request_id": f"r{i}",
            "arrival_s": now_s,
            "prompt": rng.randint(1, 120),
            "max_tokens": rng.randint(1, 60),
            "abort_s": abort_s,
        }


@pytest.mark.scheduler
@pytest.mark.parametrize("mode", ["sync", "async-v2"])
@pytest.mark.parametrize("strategy", ["auto", "tiered"])
def test_nobody_starves_in_vllms_scheduler(strategy, mode, tmp_path):
    """KV blocks are short, so that vLLM preempts."""
    pytest.importorskip("vllm")
    from bench.engine_types import RequestSpec
    from tests.worlds import MODES, serve

    pp_size, steps = 4, SCHEDULER_STEPS // 4
    requests = [RequestSpec(**fields) for fields in restless(f"{strategy} {mode}", steps // 3)]
    config = {
        "chunk": {"strategy": "fixed"},
        "rebalance": {"strategy": strategy, "base_unit": 4},
        "profiling": {"mode": "off", "directory": str(tmp_path)},
    }
    ran = serve(
        requests,
        additional_config={"ppbalance": config},
        pp_size=pp_size,
        num_gpu_blocks=160,
        max_num_batched_tokens=256,
        **MODES[mode],
    )
    assert len(ran.rows) > steps / 2
    assert ran.preemptions > steps / 200
    assert ran.scheduler.ppbalance.num_moves > steps / 20
    assert not ran.scheduler.ppbalance_failed
    in_a_row: dict[str, int] = {}
    for held, rows in zip(ran.held, ran.rows, strict=True):
        in_a_row = {name: in_a_row.get(name, 0) + 1 for name in held}
        assert max(in_a_row.values(), default=0) < pp_size
        assert rows or not held
    for request in requests:
        record = ran.result.requests[request.request_id]
        assert record.finished
        assert record.aborted or record.num_tokens == request.max_tokens
