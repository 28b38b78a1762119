"""How long prompts and outputs are: seeded models that need no data file, in tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

Pairs = list[tuple[int, int]]

PERCENTS = (*range(100), 99.5, 99.9, 100)
TOKENS_PER_WORD = 1.3
# Means of the CNN/DailyMail data set card (version 3.0.0): words of an article, of its highlights.
CNN_ARTICLE_WORDS, CNN_HIGHLIGHT_WORDS = 781, 56
CNN_CV = 0.5  # an assumption: the card gives means only


def length_percentiles(lengths: Sequence[int]) -> list[float]:
    """The committed form of a marginal: one value for each of `PERCENTS`."""
    return [round(float(v), 1) for v in np.percentile(np.array(lengths), PERCENTS)]


def load_model(name: str) -> dict[str, Any]:
    """A marginal model from `configs/lengths`: prompt and output percentiles, rate, source."""
    folder = Path(__file__).resolve().parent.parent / "configs" / "lengths"
    model: dict[str, Any] = yaml.safe_load((folder / f"{name}.yaml").read_text(encoding="utf-8"))
    for field in ("prompt_percentiles", "output_percentiles"):
        values = model[field]
        if len(values) != len(PERCENTS) or list(values) != sorted(values):
            raise ValueError(f"{name}.yaml: {field}: must be {len(PERCENTS)} ascending numbers")
    return model


def from_percentiles(model: dict[str, Any], count: int, seed: int) -> Pairs:
    """Pairs with the marginals of `model`, prompt and output independent of each other.

    In both committed traces their rank correlation is under 0.1.
    """
    draws = np.random.RandomState(seed).random_sample((2, count)) * 100.0
    prompts = np.interp(draws[0], PERCENTS, model["prompt_percentiles"])
    outputs = np.interp(draws[1], PERCENTS, model["output_percentiles"])
    return _pairs(prompts, outputs)


def cnn(count: int, seed: int) -> Pairs:
    """CNN/DailyMail-like: long prompts, short summaries. Synthetic: lognormal around the means."""
    random = np.random.RandomState(seed)
    sigma = float(np.sqrt(np.log(1.0 + CNN_CV**2)))

    def draw(words: int) -> Any:
        mu = np.log(words * TOKENS_PER_WORD) - sigma**2 / 2.0
        return random.lognormal(mu, sigma, count)

    return _pairs(draw(CNN_ARTICLE_WORDS), draw(CNN_HIGHLIGHT_WORDS))


def uniform(
    count: int, seed: int, prompt_range: tuple[int, int], output_range: tuple[int, int]
) -> Pairs:
    """Uniform in both ranges, ends included."""
    random = np.random.RandomState(seed)
    for name, (low, high) in (("prompt_range", prompt_range), ("output_range", output_range)):
        if not 1 <= low <= high:
            raise ValueError(f"{name} = {low} {high}: must be at least 1, the second not smaller")
    prompts = random.randint(prompt_range[0], prompt_range[1] + 1, count)
    outputs = random.randint(output_range[0], output_range[1] + 1, count)
    return _pairs(prompts, outputs)


def long_context(
    count: int,
    seed: int,
    prompt_range: tuple[int, int] = (8192, 131072),
    output_range: tuple[int, int] = (64, 512),
) -> Pairs:
    """Prompts log-uniform from 8k to 128k: as many from 8k to 16k as from 64k to 128k."""
    random = np.random.RandomState(seed)
    prompts = np.exp(random.uniform(np.log(prompt_range[0]), np.log(prompt_range[1]), count))
    outputs = random.randint(output_range[0], output_range[1] + 1, count)
    return _pairs(prompts, outputs)


def swap(pairs: Sequence[tuple[int, int]]) -> Pairs:
    """Prompt and output lengths exchanged."""
    return [(output, prompt) for prompt, output in pairs]


def _pairs(prompts: Any, outputs: Any) -> Pairs:
    return [
        (max(1, round(float(prompt))), max(1, round(float(output))))
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
