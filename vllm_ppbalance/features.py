"""What a cost model sees of a micro-batch, and the units that bring all of it to order one."""

from collections.abc import Sequence

from vllm_ppbalance.base_table import BaseTable

Prefills = Sequence[tuple[int, int]]

# What each coefficient multiplies: the unit of its feature, so that all are of order one. Units of
# context, square, prefix and bias are the published ones.
UNITS = {
    "base": 1.0,  # seconds of the base table
    "bias": 0.1,
    "mixed": 0.1,  # 1 where there is prefill: other graphs run than for decodes alone
    "decodes": 1 / 128,
    "context": 1e-5,  # tokens the decodes read
    "square": 2.0**-20,  # sum over prompt chunks of new tokens squared
    "prefix": 2.0**-21,  # sum of new tokens times those before them
    "past": 1e-5,  # sum of the tokens before them: read once a chunk, whatever its length
}
REFERENCE_TOKENS = 64  # terms other than the base are in multiples of the time of such a batch


def raw_features(
    base_s: float, prefills: Prefills, decodes: int, decode_context: int
) -> list[float]:
    """A micro-batch in the order of UNITS, before the units; `base_s` is the table's time."""
    square = prefix = past = 0
    for new, before in prefills:
        square += new * new
        prefix += new * before
        past += before
    return [base_s, 1.0, bool(prefills), decodes, decode_context, square, prefix, past]


def reference_units(table: BaseTable) -> dict[str, float]:
    """Seconds of a coefficient of 1, per unit of its feature."""
    reference_s = table.at(REFERENCE_TOKENS)
    return {name: unit if name == "base" else unit * reference_s for name, unit in UNITS.items()}
