"""The report on a lone long prompt: its optimum is one, and its tables hold what was run."""

import threading
import time

import pytest

pytest.importorskip("vllm")

from bench import predictor
from bench.long_prompt_report import _greedy, main, optimum, run_alone
from vllm_ppbalance.profile_store import ProfileStore

pytestmark = pytest.mark.scheduler
PROFILE, TOKENS = "h200_qwen2.5-32b", 16_384


def test_the_greedy_chunks_take_what_their_formula_says():
    def stage(new, before):
        return 0.01 + 1e-5 * new

    # Chunks of 1024 tokens, 20.24 ms: four of them, and three stages more for the last.
    assert _greedy(stage, range(64, 8193, 64), 0.0205, 4096, 4) == pytest.approx(7 * 0.02024)


def test_chunks_shrink_under_a_limit_as_the_prefix_grows():
    def stage(new, before):
        return 1e-5 * new + 1e-9 * new * before

    few = _greedy(stage, range(64, 8193, 64), 0.02, 16_384, 1)
    work = stage(16_384, 0) + 1e-9 * 16_384**2 / 2  # of pieces, however they are cut: less
    assert few < work
    longest = _greedy(stage, range(64, 8193, 64), 0.02, 16_384, 5) - few
    assert longest == pytest.approx(4 * 0.02, rel=0.05)


def test_no_run_is_faster_than_the_optimum_and_it_is_no_more_than_a_fixed_chunk():
    best_s = optimum(PROFILE, 4, TOKENS)
    runs = [
        run_alone(PROFILE, 4, {"strategy": "fixed", "fixed_tokens": chunk}, TOKENS)
        for chunk in (512, 1024, 2048, 4096)
    ]
    assert [run.chunks for run in runs] == [32, 16, 8, 4]
    least_s = min(run.ttft_s for run in runs)
    assert 0.8 * least_s < best_s < least_s
    assert all(run.work_s < run.ttft_s for run in runs)


def test_nothing_is_still_being_written_when_a_run_is_over(monkeypatch):
    save = ProfileStore.save

    def slow_save(self, model):
        time.sleep(0.3)
        save(self, model)

    monkeypatch.setattr(ProfileStore, "save", slow_save)
    assert run_alone(PROFILE, 4, {"strategy": "balanced"}, 2048).ttft_s > 0.0
    assert "ppbalance-save" not in [thread.name for thread in threading.enumerate()]


def test_the_report_is_written(tmp_path):
    out = tmp_path / "new" / "report.md"
    words = ["--tokens", "9000", "--stages", "2", "--profiles", PROFILE]
    assert main([str(out), *words]) == 0
    text = out.read_text()
    assert text.count(f"| {PROFILE}, PP=2 |") == 3
    assert "9000 prompt tokens" in text


def test_the_predictors_report_says_which_data_is_missing(tmp_path, capsys):
    assert predictor.main([str(tmp_path), "--out", str(tmp_path / "out.md")]) == 2
    assert "h200x2_pp2" in capsys.readouterr().err
    assert not (tmp_path / "out.md").exists()


@pytest.mark.parametrize("tokens", [8_192, 32_768])
def test_balanced_cuts_a_lone_prompt_as_well_as_the_best_fixed_chunk(tokens):
    fixed = [
        run_alone(PROFILE, 4, {"strategy": "fixed", "fixed_tokens": chunk}, tokens).ttft_s
        for chunk in (384, 512, 768, 1024, 1536)
    ]
    assert run_alone(PROFILE, 4, {"strategy": "balanced"}, tokens).ttft_s <= 1.03 * min(fixed)
