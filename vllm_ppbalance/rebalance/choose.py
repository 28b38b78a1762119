"""Who is held: the decodes that lose least by it."""

from collections.abc import Sequence

from vllm_ppbalance.state import Decode


def most_slack(ready: Sequence[Decode], count: int) -> list[Decode]:
    """The `count` decodes to hold: those not held just now, with the newest last token.

    Ties keep the order of `ready`, from its end: the newest requests are held first.
    """

    def rank(item: tuple[int, Decode]) -> tuple[int, float, int]:
        index, decode = item
        return decode.holds_in_a_row, -decode.last_token_s, -index

    ranked = sorted(enumerate(ready), key=rank)
    return [decode for _, decode in ranked[:count]]


def slack_s(decode: Decode, now_s: float, slo_tpot: float) -> float:
    """Seconds a decode can lose and still meet `slo_tpot` on average over its tokens so far.

    Below 0 where it misses it already. Where the time of the first token is not known, the tokens
    alone decide: a step lost is the smaller part of a request's time the more tokens it has.
    """
    allowed_s = slo_tpot * decode.output_tokens
    if decode.first_token_s <= 0.0:
        return allowed_s
    return allowed_s - (now_s - decode.first_token_s)
