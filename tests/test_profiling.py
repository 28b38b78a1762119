"""Measuring at start, learning while serving, and keeping it: vLLM's real schedulers."""

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.interface import PauseState

from bench.clock import VirtualClock
from bench.engine import Engine
from bench.engine_types import RequestSpec
from bench.pipeline import Pipeline
from bench.vllm_harness import VllmAdapter, build_scheduler
from tests.worlds import ASYNC, SYNC, batch_of, serve
from vllm_ppbalance import Scheduler
from vllm_ppbalance.__main__ import main
from vllm_ppbalance.profiling import make_request
from vllm_ppbalance.startup_profile import own_request

pytestmark = pytest.mark.scheduler
each_mode = pytest.mark.parametrize("mode", [SYNC, ASYNC], ids=["sync", "async-v2"])


def stage_s(shape):
    """5 ms, 0.1 ms a decode, 10 us a prompt token, attention over prompt and prefix."""
    seconds = 5e-3 + 1e-4 * shape.decodes + 1e-5 * shape.prefill_tokens
    return seconds + sum(1e-10 * new * (new + 2 * before) for new, before in shape.prefills)


def config(tmp_path, strategy="spread", predictor=None, **profiling):
    own = {"chunk": {"strategy": strategy}, "rebalance": {"strategy": "even_share"}}
    own["predictor"] = predictor or {}
    own["profiling"] = {"directory": str(tmp_path), **profiling}
    return {"ppbalance": own}


def run(requests, tmp_path, mode, **options):
    profiling = options.pop("profiling", {})
    return serve(
        requests,
        pp_size=options.pop("pp_size", 4),
        max_num_batched_tokens=4096,
        num_gpu_blocks=8192,
        stage=options.pop("stage", stage_s),
        additional_config=config(tmp_path, **profiling),
        **options,
        **mode,
    )


@each_mode
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_an_idle_start_is_measured_and_saved(tmp_path, mode, prefix_caching):
    late = batch_of(1, prompt=100, max_tokens=5, arrival_s=60.0)
    first = run(late, tmp_path, mode, prefix_caching=prefix_caching)
    assert not first.scheduler.ppbalance_failed
    assert set(first.tokens) == {"r0"}
    own = first.scheduler.ppbalance
    own.saver.close()
    model = own.cost_model
    assert model.trusted
    for tokens in (128, 1000, 2048, 4096):
        expected = 5e-3 + 1e-5 * tokens + 1e-10 * tokens**2
        assert model.predict(tokens, ((tokens, 0),), 0, 0) == pytest.approx(expected, rel=0.03)
    expected = 5e-3 + 1e-5 * 1024 + 1e-10 * 1024 * (1024 + 2 * 8192)
    assert model.predict(1024, ((1024, 8192),), 0, 0) == pytest.approx(expected, rel=0.05)
    second = run(late, tmp_path, mode, prefix_caching=prefix_caching)
    assert not any(own_request(name) for rows in second.rows for name in rows)
    saved = second.scheduler.ppbalance.cost_model
    assert saved.predict(1000, ((1000, 0),), 0, 0) == pytest.approx(
        model.predict(1000, ((1000, 0),), 0, 0), rel=0.01
    )


@each_mode
def test_a_request_ends_the_measuring_at_once(tmp_path, mode):
    at_s = 0.5
    ran = run(batch_of(4, prompt=100, max_tokens=20, arrival_s=at_s), tmp_path, mode)
    assert not ran.scheduler.ppbalance_failed
    assert all(r.finished and r.num_tokens == 20 for r in ran.result.requests.values())
    for step, rows in zip(ran.result.steps, ran.rows, strict=True):
        if step.schedule_s > at_s + 0.1:
            assert not any(own_request(name) for name in rows)
    assert any(own_request(name) for name in ran.rows[0])
    assert not [name for name in ran.scheduler.requests if own_request(name)]


def test_measuring_keeps_within_its_share_of_the_kv_cache(tmp_path):
    usage = []

    def stage(shape):
        usage.append(shape.num_tokens)
        return stage_s(shape)

    ran = run(
        batch_of(1, arrival_s=60.0), tmp_path, SYNC, profiling={"max_kv_share": 0.05}, stage=stage
    )
    assert not ran.scheduler.ppbalance_failed
    assert 0 < max(usage) <= 0.05 * 8192 * 16 / 4


@each_mode
@pytest.mark.parametrize("pp_size", [2, 8, 16])
def test_prefixes_are_measured_with_many_stages_and_little_time(tmp_path, mode, pp_size):
    """They decide whether equal latency is used; the largest sizes may be left out instead."""
    limit = {"profiling": {"max_seconds": 6.0}}
    late = batch_of(1, prompt=100, max_tokens=5, arrival_s=60.0)
    ran = run(late, tmp_path, mode, pp_size=pp_size, **limit)
    assert not ran.scheduler.ppbalance_failed
    model = ran.scheduler.ppbalance.cost_model
    assert model.trusted
    assert model.num_prefix_lengths >= 8
    for tokens, before in ((512, 6144), (256, 3000)):
        expected = 5e-3 + 1e-5 * tokens + 1e-10 * tokens * (tokens + 2 * before)
        predicted = model.predict(tokens, ((tokens, before),), 0, 0)
        assert predicted == pytest.approx(expected, rel=0.03)


def test_measuring_keeps_within_its_time(tmp_path):
    ran = run(batch_of(1, arrival_s=60.0), tmp_path, SYNC, profiling={"max_seconds": 0.4})
    last = [
        step.schedule_s
        for step, rows in zip(ran.result.steps, ran.rows, strict=True)
        if any(own_request(name) for name in rows)
    ][-1]
    assert 0.3 < last < 0.6


@each_mode
def test_with_profiling_off_it_learns_from_serving(tmp_path, mode):
    load = [RequestSpec(f"r{i}", 0.012 * i, 100 + 40 * (i % 9), 60) for i in range(400)]
    ran = run(load, tmp_path, mode, profiling={"mode": "off"})
    assert not ran.scheduler.ppbalance_failed
    assert not any(own_request(name) for rows in ran.rows for name in rows)
    model = ran.scheduler.ppbalance.cost_model
    assert model.num_samples > 200
    assert model.trusted
    errors = []
    for step in ran.result.steps[-400:-100]:
        shape = step.shape
        if shape.num_tokens:
            guess = model.predict(
                shape.num_tokens, shape.prefills, shape.decodes, shape.decode_context
            )
            errors.append(abs(guess / stage_s(shape) - 1))
    assert sum(errors) / len(errors) < 0.05


def test_what_was_learnt_is_kept_at_shutdown(tmp_path):
    load = [RequestSpec(f"r{i}", 0.012 * i, 100 + 40 * (i % 9), 60) for i in range(200)]
    ran = run(load, tmp_path, SYNC, profiling={"mode": "off"})
    own = ran.scheduler.ppbalance
    own.saver._thread.join(timeout=10)  # begun when it could first be trusted
    assert own.saver.store.load(1e9).num_samples < own.cost_model.num_samples
    ran.scheduler.shutdown()
    assert own.saver.store.load(1e9).num_samples == own.cost_model.num_samples


@each_mode
def test_a_pause_ends_the_measuring(tmp_path, mode):
    """Else our prompts run when vLLM 0.23 wakes with its weights alone, before the KV cache."""
    own = config(tmp_path)
    scheduler = build_scheduler(Scheduler, pp_size=2, additional_config=own, **mode)
    assert any(own_request(name) for name in scheduler.requests)
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert not scheduler.requests
    assert scheduler.pause_state == PauseState.PAUSED_ALL
    assert not scheduler.ppbalance_failed


def test_no_prompt_of_ours_holds_a_token_that_stands_for_an_image():
    """HunYuan-VL in vLLM 0.23 looks for the image behind each such token and ends the engine."""
    vllm_config = build_scheduler(pp_size=2, num_gpu_blocks=64).vllm_config
    named = {"image_start_token_id": 5, "video_token_index": 6}
    vars(vllm_config.model_config.hf_config).update(named)
    request = make_request(vllm_config, "any", 8192, 16)
    assert len(request.prompt_token_ids) == 8192
    assert not set(request.prompt_token_ids) & set(named.values())
    assert len(set(request.prompt_token_ids)) > 256


def test_strategies_without_a_model_measure_nothing(tmp_path):
    ran = run(batch_of(2), tmp_path, SYNC, profiling={"strategy": "greedy"})
    assert ran.scheduler.ppbalance.cost_model is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("start", ["measured", "saved", "guessed"])
def test_settings_of_the_predictor_reach_every_model(tmp_path, start):
    """With errors cut to a thousandth, a stage a fifth slower is hardly noticed."""
    mode = {"mode": "off"} if start == "guessed" else {}
    if start == "saved":
        run(batch_of(1, arrival_s=60.0), tmp_path, SYNC).scheduler.ppbalance.saver.close()

    def moved(folder, **predictor):
        ran = run(
            batch_of(1, arrival_s=60.0), folder, SYNC, profiling={"predictor": predictor, **mode}
        )
        own_rows = any(own_request(name) for rows in ran.rows for name in rows)
        assert own_rows == (start == "measured")
        model = ran.scheduler.ppbalance.cost_model
        shape = (1024, ((1024, 0),), 0, 0)
        before = model.predict(*shape)
        for _ in range(10):
            model.observe(*shape, 1.2 * before)
        return model.predict(*shape) / before - 1.0

    folders = [tmp_path, tmp_path] if start == "saved" else [tmp_path / "a", tmp_path / "b"]
    assert moved(folders[0]) > 0.15
    assert 0.0 < moved(folders[1], error_clip=0.001) < 0.03


def test_the_offline_profile_tells_a_wrong_setting_before_an_engine_starts(
    monkeypatch, capsys, tmp_path
):
    from vllm.v1.engine.llm_engine import LLMEngine

    def start(*_):
        raise AssertionError("an engine was started")

    monkeypatch.setattr(LLMEngine, "from_engine_args", start)
    own = '{"ppbalance": {"slo_ttft": -1}}'
    assert main(["profile", "--model", str(tmp_path), "--additional-config", own]) == 1
    assert "slo_ttft" in capsys.readouterr().err


@each_mode
def test_a_reset_of_the_prefix_cache_ends_the_measuring(tmp_path, mode):
    """Blocks of ours would make it fail on an engine that has no request."""
    own = config(tmp_path)
    engine = Engine(
        build_scheduler(Scheduler, pp_size=2, additional_config=own, prefix_caching=True, **mode),
        Pipeline([stage_s] * 2),
        VllmAdapter(),
        clock=VirtualClock(),
    )
    engine.run([], until_s=0.1)
    assert any(own_request(name) for name in engine.scheduler.requests)
    assert engine.scheduler.reset_prefix_cache()
    assert not engine.scheduler.requests
    assert not engine.scheduler.ppbalance_failed
