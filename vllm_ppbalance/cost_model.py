"""Predicts a micro-batch's time on the slowest stage, and learns from each time measured.

Form after the adaptive latency predictor of "Revisiting Pipeline Parallelism for LLM Serving"
(OSDI 2026): a base by tokens plus interference terms; here the base is learnt too.
"""

from collections.abc import Collection, Mapping, Sequence
from math import isfinite
from operator import mul
from typing import Any, Self

import numpy as np

from vllm_ppbalance.base_table import BaseTable
from vllm_ppbalance.config import PredictorSettings
from vllm_ppbalance.features import UNITS, Prefills, raw_features, reference_units
from vllm_ppbalance.jumps import Jumps
from vllm_ppbalance.rls import RecursiveLeastSquares
from vllm_ppbalance.trust import MIN_SAMPLES, Trust

VERSION = 1
PUBLISHED = PredictorSettings()
BASE_VARIANCE = 0.04  # of an interference term's: the base is measured, known to about a fifth
KNOWN = 1e-12  # variance of a term that is not learnt
FLOOR = 0.2  # a prediction is at least this share of its base
SCALES = (1e-3, 1e3)  # bounds of the base's factor, far outside what a GPU does
LOWEST = np.array([SCALES[0], -np.inf, *[0.0] * (len(UNITS) - 2)])
MAX_IDLE_S = 3600.0  # after which what was learnt is doubted: clocks, neighbours, models move
PREFIX_BUCKET = 512  # tokens; prefixes closer together count as one length


class CostModel:
    """Seconds of the slowest stage for a micro-batch: base(tokens) + theta . features.

    `profiled` says that `table` was measured on this deployment; otherwise it is a guess, see
    `Trust`. `theta` has one number for each of UNITS; those not in `learn` keep it.
    """

    def __init__(
        self,
        table: BaseTable,
        theta: Sequence[float] | None = None,
        *,
        profiled: bool = False,
        learn: Collection[str] = tuple(UNITS),
        settings: PredictorSettings = PUBLISHED,
    ) -> None:
        self._table = table
        self.profiled = profiled
        self._clip = settings.error_clip
        start = [1.0, *[0.0] * (len(UNITS) - 1)] if theta is None else list(theta)
        each = settings.initial_variance
        variance = [BASE_VARIANCE * each, *[each] * (len(UNITS) - 1)]
        variance = [v if name in learn else KNOWN for name, v in zip(UNITS, variance, strict=True)]
        self._rls = RecursiveLeastSquares(start, variance, settings.forgetting)
        self._units = list(reference_units(table).values())
        self.trust = Trust((table.tokens[0], table.tokens[-1]) if profiled else None)
        self._terms: list[float] = []
        self._jumps = Jumps(settings.error_clip)
        self._last_s: float | None = None
        self._prefix_lengths: set[int] = set()
        self._refresh()

    def predict(
        self, num_tokens: int, prefills: Prefills, decodes: int, decode_context: int
    ) -> float:
        """Seconds for a micro-batch; always finite and above 0, 0 for an empty one.

        `prefills` are (new tokens, tokens before them) of each prompt chunk, `decode_context` is
        the number of tokens all decodes read. `num_tokens` counts prompt and decode tokens.
        """
        if num_tokens < 1:
            return 0.0
        factor, fixed, mixed, decode, context, square, prefix, past = self._terms
        base = factor * self._table.at(num_tokens)
        seconds = base + fixed + decode * decodes + context * decode_context
        for new, before in prefills:
            seconds += new * (square * new + prefix * before) + past * before
        if prefills:
            seconds += mixed
        return max(seconds, FLOOR * base)

    def observe(
        self,
        num_tokens: int,
        prefills: Prefills,
        decodes: int,
        decode_context: int,
        measured_s: float,
        weight: float = 1.0,
        now_s: float | None = None,
    ) -> bool:
        """Learn one measured stage time; False where the sample is refused.

        `weight` above 0 and at most 1 is its trust. `now_s` on any steady clock lets the model
        notice that it has been idle for long.
        """
        usable = num_tokens > 0 and isfinite(measured_s) and measured_s > 0.0
        if not (usable and 0.0 < weight <= 1.0):
            return False
        self._note_age(now_s)
        raw = raw_features(self._table.at(num_tokens), prefills, decodes, decode_context)
        predicted = max(sum(map(mul, raw, self._terms)), FLOOR * self._terms[0] * raw[0])
        error = measured_s / predicted - 1.0
        x = [value * unit / predicted for value, unit in zip(raw, self._units, strict=True)]
        if not self._rls.update(x, error, weight, self._clip):
            return False
        self._bound()
        self._table.learn(num_tokens, min(max(error, -self._clip), self._clip), weight)
        self._refresh()
        self.trust.note(num_tokens, predicted, measured_s, weight)
        if self._jumps.note(error, raw, measured_s):
            self._follow_jump()
        for _, before in prefills:
            self._note_prefix(before)
        return True

    def base(self, num_tokens: int) -> float:
        """Seconds by tokens alone; never less for more tokens."""
        return self._terms[0] * self._table.at(num_tokens)

    def decodes_s(self, decodes: int, decode_context: int) -> float:
        """Seconds that decodes take in a micro-batch beyond those of so many prompt tokens."""
        _, _, _, decode, context, _, _, _ = self._terms
        return decode * decodes + context * decode_context

    def tile(self) -> int:
        """Tokens of the GPU's tile as the profile shows it, 0 where it shows none."""
        return self._table.tile

    def terms(self) -> dict[str, float]:
        """Seconds per unit of each feature of UNITS; for `base`, the factor of the table."""
        return dict(zip(UNITS, self._terms, strict=True))

    @property
    def num_prefix_lengths(self) -> int:
        """Distinct prefix lengths seen, zero included."""
        return len(self._prefix_lengths)

    @property
    def num_samples(self) -> int:
        """Stage times learnt from."""
        return self.trust.num_samples

    @property
    def trusted(self) -> bool:
        """Whether a policy may follow the predictions."""
        return self.health is None

    @property
    def health(self) -> str | None:
        """Why a policy should use a fixed budget instead; None while the model is sound."""
        return self.trust.why_not(self._table)

    def to_dict(self) -> dict[str, Any]:
        """All that is learnt, for JSON."""
        return {
            "version": VERSION,
            "tokens": list(self._table.tokens),
            "seconds": list(self._table.seconds),
            "tile": self._table.tile,
            "tile_s": self._table.tile_s,
            "terms": self.terms(),
            "profiled": self.profiled,
            "num_samples": self.num_samples,
            "prefix_lengths": sorted(self._prefix_lengths),
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any], settings: PredictorSettings = PUBLISHED) -> Self:
        """The model `to_dict` wrote, uncertain as at first. Raises ValueError saying why."""
        try:
            if saved["version"] != VERSION:
                raise ValueError(f"version {saved['version']!r}, this is {VERSION}")
            table = BaseTable(
                [int(n) for n in saved["tokens"]],
                [float(s) for s in saved["seconds"]],
                int(saved["tile"]),
                float(saved["tile_s"]),
                samples=float(MIN_SAMPLES),
            )
            units = reference_units(table)
            theta = [float(saved["terms"][name]) / unit for name, unit in units.items()]
            model = cls(table, theta, profiled=bool(saved["profiled"]), settings=settings)
            model.trust.num_samples = int(saved["num_samples"])
            model._prefix_lengths = {int(n) for n in saved["prefix_lengths"]}
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise ValueError(f"not a saved cost model: {error!r}") from error
        model._bound()
        model._refresh()
        return model

    def note_prefixes(self, prefixes: Sequence[int]) -> None:
        """Count prefix lengths that a profile has measured."""
        for before in prefixes:
            self._note_prefix(before)

    def _bound(self) -> None:
        """Nothing a batch carries makes it faster; only the bias may be below 0."""
        theta = self._rls.theta
        np.maximum(theta, LOWEST, out=theta)
        if theta[0] > SCALES[1]:
            theta[0] = SCALES[1]

    def _refresh(self) -> None:
        theta = self._rls.theta.tolist()
        self._terms = [value * unit for value, unit in zip(theta, self._units, strict=True)]

    def _note_prefix(self, before: int) -> None:
        self._prefix_lengths.add(before // PREFIX_BUCKET)

    def _follow_jump(self) -> None:
        """Start anew, at the new speed where all work has changed alike."""
        self._rls.doubt()
        self.trust.start_anew()
        factor = self._jumps.take(self._terms)
        if factor is not None:
            self._rls.theta *= factor
            self._bound()
            self._refresh()

    def _note_age(self, now_s: float | None) -> None:
        if now_s is None:
            return
        if self._last_s is not None and now_s - self._last_s > MAX_IDLE_S:
            self._rls.doubt()
        self._last_s = now_s
