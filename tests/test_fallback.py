"""What goes wrong with stage times: budgets stay sane, and a fallback is said once.

Each case feeds a controller stage times and asks for a budget after each; see test_cost_model for
the models alone.
"""

import logging
from dataclasses import dataclass

import pytest

from tests.test_policies import pipeline
from tests.test_predictive_policies import LONG, cost_model, prompts
from vllm_ppbalance.config import Settings
from vllm_ppbalance.controller import Controller
from vllm_ppbalance.cost_model import CostModel
from vllm_ppbalance.profile_fit import Measured, fit_cost_model
from vllm_ppbalance.profile_store import ProfileStore
from vllm_ppbalance.roofline import roofline
from vllm_ppbalance.state import MicroBatch

SIZES = (128, 256, 512, 1024, 2048, 4096, 8192)
FALLBACK = {"alp": 512, "spread": 512, "equal_latency": 8192}


def true_s(tokens, prefix=0):
    """Stage seconds of a prompt chunk; what `cost_model(**LONG)` predicts."""
    return 8e-3 + 4e-5 * tokens + 5e-9 * tokens * (2 * prefix + tokens)


def measured(seconds, sizes=SIZES):
    return [Measured(n, ((n, p),), 0, 0, seconds(n)) for n in sizes for p in range(0, 9000, 1000)]


@dataclass
class Case:
    """A model at start and the stage times it then sees: (tokens, seconds, pause before)."""

    model: CostModel
    samples: list[tuple[int, float, float]]
    reason: str | None = None  # what a fallback says; None where none is needed
    ends_trusted: bool = True
    fixed_throughout: bool = False
    slo_tpot: float = 0.2  # longer where the stages become too slow for any chunk to keep it


def normal(count=60, factor=1.0):
    return [(n, factor * true_s(n), 0.0) for n in (SIZES * count)[:count]]


def guess():
    return roofline(15e9, 0.7e15, 4e12, attention_flops_per_pair=655_360)


CASES = {
    "constant latencies, profiled": lambda: Case(
        fit_cost_model(measured(lambda n: 0.02)),
        [(n, 0.02, 0.0) for n in SIZES * 5],
        "no longer than",
        ends_trusted=False,
        fixed_throughout=True,
    ),
    "constant latencies, guessed": lambda: Case(
        guess(), [(n, 0.02, 0.0) for n in SIZES * 250], "no longer than", ends_trusted=False
    ),
    "negative curvature": lambda: Case(
        fit_cost_model(measured(lambda n: 0.01 + 2e-4 * n**0.5)),
        [(n, 0.01 + 2e-4 * n**0.5, 0.0) for n in SIZES * 20],
    ),
    "first sample 30x too long": lambda: Case(
        cost_model(**LONG), [(512, 30.0 * true_s(512), 0.0), *normal()]
    ),
    "first point of the profile 30x too long": lambda: Case(
        fit_cost_model(
            [p._replace(seconds=p.seconds * (30.0 if i == 0 else 1.0))
             for i, p in enumerate(measured(true_s))]
        ),
        normal(),
    ),
    "all points of one size": lambda: Case(
        fit_cost_model(measured(true_s, [512])),
        [(512, true_s(512), 0.0)] * 100,
        "1 batch size",
        ends_trusted=False,
        fixed_throughout=True,
    ),
    "all samples of one size": lambda: Case(
        cost_model(**LONG), [(512, true_s(512), 0.0)] * 500
    ),
    "a tenfold jump": lambda: Case(
        cost_model(**LONG), [*normal(), *normal(120, 10.0)], "sudden change", slo_tpot=2.0
    ),
    "a tenfold drop": lambda: Case(
        cost_model(**LONG), [*normal(), *normal(120, 0.1)], "sudden change"
    ),
    "an hour idle": lambda: Case(
        cost_model(**LONG), [*normal(), (512, true_s(512), 3700.0), *normal()]
    ),
    "50 tokens before 8k, profiled": lambda: Case(
        cost_model(**LONG), [(50, true_s(50), 0.0), *[(8192, true_s(8192), 0.0)] * 80]
    ),
    "50 tokens before 8k, guessed": lambda: Case(
        guess(), [(50, true_s(50), 0.0), *[(8192, true_s(8192), 0.0)] * 80]
    ),
}  # fmt: skip


@dataclass
class Ran:
    budgets: list[int]
    trusted: list[bool]
    warnings: list[str]


def run(strategy, case, folder, caplog):
    settings = Settings.model_validate({"chunk": {"strategy": strategy}, "slo_tpot": case.slo_tpot})
    own = Controller(settings, 4, "step")
    # Alone for equal latency, which does nothing in company; late, so that alp must hurry.
    waiting = prompts(60_000, prefix=8192, waited_s=1.9)
    ran, now_s = Ran([], [], []), 0.0
    with caplog.at_level(logging.INFO, "vllm.ppbalance"):
        own.use_model(case.model, ProfileStore(folder, {"model": "m"}))
        own.saver = None
        for step, (tokens, seconds, pause_s) in enumerate(case.samples, 100):
            now_s += seconds + pause_s
            batch = MicroBatch(step, 1, 0, 0, 0, ((tokens, 0),), 0)
            own.learn(batch, seconds, now_s)
            decision = own.decide(pipeline([0] * 4, step, now_s=now_s, **waiting))
            ran.budgets.append(decision.budget)
            ran.trusted.append(case.model.trusted)
    ran.warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    return ran


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("strategy", FALLBACK)
def test_budgets_stay_sane_and_a_fallback_is_said_once(strategy, name, tmp_path, caplog):
    case = CASES[name]()
    ran = run(strategy, case, tmp_path, caplog)
    assert all(isinstance(budget, int) for budget in ran.budgets)
    # The prompts are late: a collapse to the smallest chunk (128) would be the worst answer.
    assert 256 <= min(ran.budgets) <= max(ran.budgets) <= 8192
    untrusted = [b for b, ok in zip(ran.budgets, ran.trusted, strict=True) if not ok]
    assert set(untrusted) <= {FALLBACK[strategy]}
    assert ran.trusted[-1] == case.ends_trusted
    if case.fixed_throughout:
        assert len(untrusted) == len(ran.budgets)
    said = [text for text in ran.warnings if "predictions are not followed" in text]
    assert len(said) == (case.reason is not None), ran.warnings
    if case.reason is not None:
        assert untrusted
        assert case.reason in said[0]


def test_a_health_that_comes_and_goes_is_said_every_ten_seconds_at_most(tmp_path, caplog):
    own = Controller(Settings.model_validate({"chunk": {"strategy": "alp"}}), 4, "step")
    model = cost_model(**LONG)
    own.use_model(model, ProfileStore(tmp_path, {"model": "m"}))
    own.saver = None
    batch = MicroBatch(1, 1, 0, 0, 0, ((512, 0),), 0)
    with caplog.at_level(logging.INFO, "vllm.ppbalance"):
        for i in range(300):
            model.trust.mean_error = 0.9 * (i % 2)
            own.learn(batch, true_s(512), 0.1 * i)
    assert 2 <= len(caplog.records) <= 4
