"""Who is held: the decodes that lose least by it."""

from collections.abc import Sequence

from vllm_ppbalance.state import Decode


def newest_first(ready: Sequence[Decode], count: int) -> list[Decode]:
    """`count` decodes to hold: the newest of those not held just now, then the least held.

    Reads `ready` from its end, no further than it must.
    """
    chosen: list[Decode] = []
    held: list[Decode] = []
    for decode in reversed(ready):
        if len(chosen) == count:
            return chosen
        (held if decode.holds_in_a_row else chosen).append(decode)
    held.sort(key=lambda decode: decode.holds_in_a_row)
    return (chosen + held)[:count]


def slack_s(decode: Decode, now_s: float, slo_tpot: float) -> float:
    """Seconds a decode can lose and still meet `slo_tpot` on average over its tokens so far.

    Below 0 where it misses it already. Where the time of the first token is not known, the tokens
    alone decide: a step lost is the smaller part of a request's time the more tokens it has.
    """
    allowed_s = slo_tpot * decode.output_tokens
    if decode.first_token_s <= 0.0:
        return allowed_s
    return allowed_s - (now_s - decode.first_token_s)
