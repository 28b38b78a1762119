"""What each cohort carries: decodes and the tokens they read."""

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
    before = state.step - state.pp_size
    for batch in state.recent:
        if batch.step == before and batch.next_decodes:
            known = min(batch.next_decodes, state.num_ready)
            read = next_context(batch) * known // batch.next_decodes
            return read + int(mean * (state.num_ready - known))
    return int(mean * state.num_ready)


def cohort_loads(state: PipelineState) -> list[tuple[int, int]]:
    """(decodes, tokens they read) of each cohort, this step's first; held ones at the mean."""
    flying = [(batch.next_decodes, next_context(batch)) for batch in state.in_flight]
    decodes = sum(count for count, _ in flying)
    mean = sum(read for _, read in flying) / decodes if decodes else 0.0
    if not decodes:
        last = [batch for batch in state.recent if batch.next_decodes]
        decodes = sum(batch.next_decodes for batch in last)
        mean = sum(map(next_context, last)) / decodes if decodes else 0.0
    loads = [[0, 0] for _ in range(state.pp_size)]
    loads[0] = [state.num_ready, ready_context(state, mean)]
    for batch, (count, read) in zip(state.in_flight, flying, strict=True):
        load = loads[(batch.step - state.step) % state.pp_size]
        load[0] += count
        load[1] += read
    for step, count in state.parked.items():
        load = loads[(step - state.step) % state.pp_size]
        load[0] += count
        load[1] += int(mean * count)
    return [(count, read) for count, read in loads]


def prompts_in_round(state: PipelineState) -> int:
    """Prompt tokens in the last round of micro-batches."""
    return sum(batch.prefill_tokens for batch in state.recent)
