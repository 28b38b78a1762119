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
