"""Recursive least squares against numpy's own, and what keeps it from winding up."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ppbalance.rls import RecursiveLeastSquares

TRUE = np.array([2.0, -1.0, 0.5])


def learn(model, rows, values, weights=None):
    for i, (row, value) in enumerate(zip(rows, values, strict=True)):
        weight = 1.0 if weights is None else weights[i]
        assert model.update(row, value - model.theta @ row, weight)


def samples(count, seed=0, noise=0.1):
    random = np.random.RandomState(seed)
    rows = random.randn(count, len(TRUE))
    return rows, rows @ TRUE + noise * random.randn(count)


def test_without_forgetting_it_is_least_squares():
    rows, values = samples(60)
    model = RecursiveLeastSquares([0.0] * 3, [1e7] * 3, forgetting=1.0)
    learn(model, rows, values)
    assert model.theta == pytest.approx(np.linalg.lstsq(rows, values, rcond=None)[0], rel=1e-5)


def test_weights_are_those_of_weighted_least_squares():
    rows, values = samples(60)
    weights = np.random.RandomState(1).uniform(0.1, 1.0, 60)
    model = RecursiveLeastSquares([0.0] * 3, [1e7] * 3, forgetting=1.0)
    learn(model, rows, values, weights)
    root = np.sqrt(weights)
    expected = np.linalg.lstsq(rows * root[:, None], values * root, rcond=None)[0]
    assert model.theta == pytest.approx(expected, rel=1e-5)


def test_a_variance_is_a_ridge_towards_the_first_guess():
    rows, values = samples(10)
    model = RecursiveLeastSquares([1.0, 1.0, 1.0], [0.5, 1.0, 2.0], forgetting=1.0)
    learn(model, rows, values)
    ridge = np.diag([2.0, 1.0, 0.5])
    expected = np.linalg.solve(rows.T @ rows + ridge, rows.T @ values + ridge @ np.ones(3))
    assert model.theta == pytest.approx(expected, rel=1e-9)


def test_one_direction_forgets_like_an_exponential_window():
    model = RecursiveLeastSquares([0.0], [1e6], forgetting=0.9)
    values = [1.0] * 200 + [3.0] * 5
    learn(model, [[1.0]] * len(values), values)
    assert model.theta[0] == pytest.approx(3.0 - 2.0 * 0.9**5, rel=1e-3)


def test_what_is_not_excited_is_neither_forgotten_nor_made_less_sure():
    rows, values = samples(400, noise=0.01)
    model = RecursiveLeastSquares([0.0] * 3, [1.25] * 3, forgetting=0.99)
    learn(model, rows, values)
    known, sure = model.theta.copy(), np.diag(model.covariance).copy()
    learn(model, [[1.0, 0.0, 0.0]] * 20_000, [TRUE[0]] * 20_000)
    assert model.theta[1:] == pytest.approx(known[1:], abs=1e-3)
    assert (np.diag(model.covariance)[1:] <= sure[1:] * 1.01).all()


def test_it_follows_a_change():
    rows, values = samples(2000, noise=0.01)
    model = RecursiveLeastSquares([0.0] * 3, [1.25] * 3, forgetting=0.99)
    learn(model, rows, values)
    rows, values = samples(2000, seed=1, noise=0.01)
    learn(model, rows, values + rows @ [1.0, 0.0, -3.0])
    assert model.theta - TRUE == pytest.approx([1.0, 0.0, -3.0], abs=0.02)


def test_an_error_is_cut_to_its_limit():
    cut, small = (RecursiveLeastSquares([0.0], [1.0]) for _ in range(2))
    cut.update([1.0], 1e9, limit=0.4)
    small.update([1.0], 0.4)
    assert cut.theta[0] == small.theta[0] > 0.0


def test_doubt_makes_it_learn_as_fast_as_at_first():
    model = RecursiveLeastSquares([0.0], [1.0], forgetting=1.0)
    learn(model, [[1.0]] * 1000, [1.0] * 1000)
    before = model.theta[0]
    model.doubt()
    model.update([1.0], 1.0)
    assert model.theta[0] == pytest.approx(before + 0.5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused_and_changes_nothing(bad):
    model = RecursiveLeastSquares([1.0, 2.0], [1.0, 1.0])
    for x, error, weight in (
        ([bad, 1.0], 0.1, 1.0),
        ([1.0, 1.0], bad, 1.0),
        ([1.0, 1.0], 0.1, bad),
        ([1e200, 1e200], 0.1, 1.0),
    ):
        assert not model.update(x, error, weight)
    assert not model.update([1.0, 1.0], 0.1, 0.0)
    assert model.theta.tolist() == [1.0, 2.0]
    assert model.covariance.tolist() == [[1.0, 0.0], [0.0, 1.0]]


@pytest.mark.parametrize(
    ("theta", "variance", "forgetting"),
    [
        ([1.0], [1.0, 1.0], 0.9),
        ([math.nan], [1.0], 0.9),
        ([1.0], [0.0], 0.9),
        ([1.0], [math.inf], 0.9),
        ([1.0], [1.0], 0.0),
        ([1.0], [1.0], 1.1),
    ],
)
def test_bad_starts_are_refused(theta, variance, forgetting):
    with pytest.raises(ValueError, match="must"):
        RecursiveLeastSquares(theta, variance, forgetting)


numbers = st.floats(-1e3, 1e3)


@given(
    st.lists(
        st.tuples(numbers, numbers, st.floats(-1e6, 1e6), st.floats(0.01, 1.0)),
        min_size=1,
        max_size=60,
    )
)
def test_theta_stays_finite_and_the_covariance_bounded(rows):
    model = RecursiveLeastSquares([0.0, 0.0], [1.25, 1.25], forgetting=0.9)
    for first, second, error, weight in rows:
        model.update([first, second], error, weight, limit=0.4)
    assert np.isfinite(model.theta).all()
    values = np.linalg.eigvalsh(model.covariance)
    assert values.max() <= 1.25 * 1.5
    assert values.min() >= -1e-9
