"""What each cohort carries: decodes and the tokens they read."""

from collections.abc import Iterable

from vllm_ppbalance.state import MicroBatch, PipelineState


def next_context(batch: MicroBatch) -> int:
    """Tokens that the decodes read which follow on `batch`; prompts it finished are among them."""
    if batch.next_decodes == batch.num_decodes:
        return batch.decode_context
    finished = batch.next_decodes - batch.num_decodes
    if finished < 0:  # some of its decodes are gone
        return batch.decode_context * batch.next_decodes // batch.num_decodes
    # Chunks that end no prompt come last in a micro-batch.
    return batch.decode_context + sum(new + past for new, past in batch.prefills[:finished])


def ready_context(state: PipelineState, mean: float) -> int:
    """About what the ready decodes read: as their micro-batch before, others at `mean` each."""
    before, ready = state.step - state.pp_size, state.num_ready
    for batch in state.recent:
        if batch.step == before and batch.next_decodes:
            read = next_context(batch)
            if batch.next_decodes == ready:
                return read
            known = min(batch.next_decodes, ready)
            return read * known // batch.next_decodes + int(mean * (ready - known))
    return int(mean * ready)


def mean_context(batches: Iterable[MicroBatch]) -> float:
    """Tokens that a decode reads which follows on one of `batches`, on average; 0 without any."""
    decodes = read = 0
    for batch in batches:
        if batch.next_decodes:
            decodes += batch.next_decodes
            read += next_context(batch)
    return read / decodes if decodes else 0.0


def cohort_loads(state: PipelineState) -> list[tuple[int, int]]:
    """(decodes, tokens they read) of each cohort, this step's first; held ones at the mean."""
    step, pp_size = state.step, state.pp_size
    mean = mean_context(state.in_flight) or mean_context(state.recent)
    decodes, reads = [0] * pp_size, [0] * pp_size
    decodes[0], reads[0] = state.num_ready, ready_context(state, mean)
    for batch in state.in_flight:
        cohort = (batch.step - step) % pp_size
        decodes[cohort] += batch.next_decodes
        if batch.next_decodes:
            reads[cohort] += next_context(batch)
    for due, count in state.parked.items():
        cohort = (due - step) % pp_size
        decodes[cohort] += count
        reads[cohort] += int(mean * count)
    return list(zip(decodes, reads, strict=True))


def prompts_in_round(state: PipelineState) -> int:
    """Prompt tokens in the last round of micro-batches."""
    return sum(batch.prefill_tokens for batch in state.recent if batch.prefills)
