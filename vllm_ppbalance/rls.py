"""Recursive least squares that forgets only along what it sees, so it cannot wind up.

Source of the forgetting: R. Kulhavy, "Restricted exponential forgetting in real-time
identification", Automatica 23 (1987).
"""

from collections.abc import Sequence
from math import inf, isfinite, sqrt
from operator import mul

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
        self._variance: Floats = np.array(variance, dtype=np.float64)
        if self.theta.ndim != 1 or self.theta.shape != self._variance.shape:
            raise ValueError(f"{len(theta)} coefficients, {len(variance)} variances: must match")
        if not (np.isfinite(self.theta).all() and np.isfinite(self._variance).all()):
            raise ValueError(f"theta = {theta}, variance = {variance}: must be finite")
        if not (self._variance > 0.0).all():
            raise ValueError(f"variance = {variance} must be above 0")
        if not 0.0 < forgetting <= 1.0:
            raise ValueError(f"forgetting = {forgetting} must be above 0 and at most 1")
        self._forgetting = forgetting
        self.covariance: Floats = np.diag(self._variance)

    def update(
        self, x: Sequence[float], error: float, weight: float = 1.0, limit: float = inf
    ) -> bool:
        """Learn from `error` = y - theta . x of one sample, cut to +-`limit`.

        `weight` is the sample's trust, 1 for a normal one. Returns False, and learns nothing, when
        a number is not finite or the weight not above 0.
        """
        if not (isfinite(error) and isfinite(sum(map(mul, x, x))) and 0.0 < weight < inf):
            return False
        features = np.array(x, dtype=np.float64)
        gain = self.covariance @ features
        doubt = weight * float(features @ gain)  # how unsure the prediction is, against noise
        if doubt <= 0.0:
            return True
        keep = self._forgetting - (1.0 - self._forgetting) / doubt
        if keep < 0.0 and doubt >= weight * float(features * features @ self._variance):
            keep = 0.0
        cut = min(max(error, -limit), limit)
        theta = self.theta + gain * (weight * cut / (1.0 + doubt))
        shrink = gain * (sqrt(abs(keep) * weight / abs(1.0 + keep * doubt)))
        # Plain broadcasting: np.outer costs several times as much at this size.
        change = shrink[:, None] * shrink
        covariance = self.covariance - change if keep > 0.0 else self.covariance + change
        if not isfinite(float(theta @ theta)):
            return False
        self.theta, self.covariance = theta, covariance
        return True

    def doubt(self) -> None:
        """Go back to the first uncertainty and keep `theta`: what was learnt may be stale."""
        self.covariance = np.diag(self._variance)
