"""GPU time of every pipeline stage, by CUDA events inside vLLM's workers (Model Runner V2).

Sent to the workers with `collective_rpc`, which wants VLLM_ALLOW_INSECURE_SERIALIZATION=1. A stage
begins when its input has come and ends with its forward pass; the last stage's sampling is apart.
"""

from typing import Any

FIELDS = ("tokens", "rows", "start_s", "forward_s", "sample_s")


def install(wrapper: Any) -> int:
    """In a worker: record events around each micro-batch. The worker's rank."""
    import torch

    runner = wrapper.worker.model_runner
    execute, sample = runner.execute_model, runner.sample_tokens
    log: list[list[Any]] = []

    def event() -> Any:
        made = torch.cuda.Event(enable_timing=True)
        made.record()
        return made

    def timed_execute(scheduled: Any, tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
        if tensors is not None:
            tensors.wait_for_comm()  # the stream waits here instead of a little later
        row = [scheduled.total_num_scheduled_tokens, len(scheduled.num_scheduled_tokens), event()]
        output = execute(scheduled, tensors, *args, **kwargs)
        row.append(event())
        if row[0]:
            log.append(row)
        return output

    def timed_sample(*args: Any, **kwargs: Any) -> Any:
        output = sample(*args, **kwargs)
        if log:
            log[-1].append(event())
        return output

    runner.execute_model, runner.sample_tokens = timed_execute, timed_sample
    wrapper.worker.ppbalance_events = (log, execute, sample)
    return int(wrapper.worker.rank)


def collect(wrapper: Any) -> list[list[float]]:
    """In a worker: the rows so far, as `FIELDS`, seconds from the first event; stops recording."""
    import torch

    log, execute, sample = wrapper.worker.ppbalance_events
    runner = wrapper.worker.model_runner
    runner.execute_model, runner.sample_tokens = execute, sample
    torch.cuda.synchronize()
    rows = []
    for tokens, requests, start, end, *sampled in log:
        after = sampled[0] if sampled else end
        times = (log[0][2].elapsed_time(start), start.elapsed_time(end), end.elapsed_time(after))
        rows.append([tokens, requests, *(round(ms / 1e3, 7) for ms in times)])
    return rows
