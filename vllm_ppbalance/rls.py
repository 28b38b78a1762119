"""Recursive least squares that forgets only along what it sees, so it cannot wind up.

Source of the forgetting: L. Cao and H. Schwartz, "A directional forgetting algorithm based on the
decomposition of the information matrix", Automatica 36 (2000).
"""

from collections.abc import Sequence
from math import inf, isfinite

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class RecursiveLeastSquares:
    """Coefficients `theta` of y = theta . x, learnt a sample at a time.

    `theta` starts at a guess whose coefficients have the variances `variance`, in the units of a
    sample's noise. `forgetting` in (0, 1] is the factor by which an old sample's weight shrinks
    with each new one in its direction; the uncertainty never grows past the first one. Raises
    ValueError on bad shapes or bounds.
    """

    def __init__(
        self, theta: Sequence[float], variance: Sequence[float], forgetting: float = 0.9975
    ) -> None:
        self.theta: Floats = np.array(theta, dtype=np.float64)
        spread = np.array(variance, dtype=np.float64)
        if self.theta.ndim != 1 or self.theta.shape != spread.shape:
            raise ValueError(f"theta {self.theta.shape} and variance {spread.shape} must match")
        if not (np.isfinite(self.theta).all() and np.isfinite(spread).all() and spread.min() > 0):
            raise ValueError(f"theta and variance must be finite, variance above 0: {variance}")
        if not 0.0 < forgetting <= 1.0:
            raise ValueError(f"forgetting = {forgetting} must be above 0 and at most 1")
        self._first = 1.0 / spread
        self._information: Floats = np.diag(self._first)
        self._forget = 1.0 - forgetting

    @property
    def covariance(self) -> Floats:
        """Uncertainty of theta, shape (n, n)."""
        return np.asarray(np.linalg.inv(self._information), dtype=np.float64)

    def update(
        self, x: Sequence[float], error: float, weight: float = 1.0, limit: float = inf
    ) -> bool:
        """Learn from `error` = y - theta . x of one sample, cut to +-`limit`.

        `weight` is the sample's trust, 1 for a normal one. Returns False, and learns nothing, when
        a number is not finite or the weight not above 0.
        """
        features = np.array(x, dtype=np.float64)
        if not (isfinite(error) and 0.0 < weight < inf and isfinite(features.sum())):
            return False
        seen = self._information @ features
        known = float(features @ seen)
        if known == 0.0:
            return True
        at_first = float((features * features) @ self._first)
        forget = min(self._forget, max(1.0 - at_first / known, 0.0))
        information = self._information + np.outer(features, weight * features)
        if forget > 0.0:
            information -= np.outer(seen, seen * (forget / known))
        step = np.linalg.solve(information, features)
        theta = self.theta + step * (weight * min(max(error, -limit), limit))
        if not isfinite(theta.sum()):
            return False
        self.theta, self._information = theta, information
        return True

    def doubt(self) -> None:
        """Go back to the first uncertainty and keep `theta`: what was learnt may be stale."""
        self._information = np.diag(self._first)
