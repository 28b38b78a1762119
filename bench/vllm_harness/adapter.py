"""Drives a real vLLM scheduler for `bench.engine`: deterministic tokens in place of a model."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from zlib import crc32

from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from bench.batch import BatchShape
from bench.engine_types import RequestSpec, StepPlan
from bench.vllm_harness.build import EOS, VOCABULARY
from bench.vllm_harness.requests import make_request

Sample = Callable[[str, int], int]
Accept = Callable[[str, int], int]


def sample_token(request_id: str, position: int) -> int:
    """The token a request gets at an output position, whatever the schedule; never EOS."""
    return 3 + crc32(f"{request_id}/{position}".encode()) % (VOCABULARY - 3)


def accept_all_but_every_third(_request_id: str, position: int) -> int:
    """Draft tokens accepted at an output position: many, then one, then none, in turn."""
    return (1 << 10, 1, 0)[position % 3]


def batch_shape(scheduler: Any, scheduler_output: Any) -> BatchShape:
    """The micro-batch's shape; call it right after `schedule()`, before anything is updated."""
    return plan_step(scheduler, scheduler_output).shape


def plan_step(scheduler: Any, scheduler_output: Any) -> StepPlan:
    """Shape and sampling rows of a fresh `schedule()` result, from the requests' state.

    `schedule()` has already advanced `num_computed_tokens` by what it scheduled. A recomputed
    (preempted) request is a prefill until it is back at its last token.
    """
    requests = scheduler.requests
    drafts = scheduler_output.scheduled_spec_decode_tokens
    prefills: list[tuple[int, int]] = []
    sampling: list[str] = []
    decodes = decode_tokens = decode_context = 0
    for request_id, new_tokens in scheduler_output.num_scheduled_tokens.items():
        request = requests[request_id]
        computed = request.num_computed_tokens
        if not request.is_prefill_chunk:
            sampling.append(request_id)
        expected = 1 + len(drafts[request_id]) if request_id in drafts else 1
        if new_tokens <= expected and computed - new_tokens >= request.num_prompt_tokens:
            decodes += 1
            decode_tokens += new_tokens
            decode_context += computed
        else:
            prefills.append((new_tokens, computed - new_tokens))
    shape = BatchShape(tuple(prefills), decodes, decode_tokens, decode_context)
    return StepPlan(shape, tuple(sampling))


def model_output(
    scheduler_output: Any,
    scheduler: Any,
    sample: Sample = sample_token,
    *,
    plan: StepPlan | None = None,
    accept: Accept = accept_all_but_every_third,
    grammar_tokens: Mapping[str, int] | None = None,
) -> Any:
    """What the model runner would answer: tokens for each row whose prefill this step finished.

    Call it when the batch is done, with the plan read when it was scheduled (without one, only
    right after `schedule()`), and in the order of the steps: positions come from the requests.
    """
    plan = plan or plan_step(scheduler, scheduler_output)
    drafts = scheduler_output.scheduled_spec_decode_tokens
    requests = scheduler.requests
    request_ids = list(scheduler_output.num_scheduled_tokens)
    sampled: dict[str, list[int]] = {}
    for request_id in plan.sampling:
        request = requests.get(request_id)
        if request is None:
            continue  # aborted meanwhile: vLLM ignores the row
        position = request.num_output_tokens
        if grammar_tokens and request_id in grammar_tokens:
            sampled[request_id] = [grammar_tokens[request_id]]
        elif request_id in drafts:
            accepted = min(len(drafts[request_id]), accept(request_id, position))
            sampled[request_id] = [sample(request_id, position + i) for i in range(1 + accepted)]
        else:
            sampled[request_id] = [sample(request_id, position)]
    return ModelRunnerOutput(
        req_ids=request_ids,
        req_id_to_index={request_id: i for i, request_id in enumerate(request_ids)},
        sampled_token_ids=[sampled.get(request_id, []) for request_id in request_ids],
    )


class VllmAdapter:
    """Drives vLLM's scheduler for `bench.engine.Engine`."""

    def __init__(
        self, sample: Sample = sample_token, accept: Accept = accept_all_but_every_third
    ) -> None:
        self._sample = sample
        self._accept = accept

    def queue_depth(self, scheduler: Any) -> int:
        """vLLM's own number: pp_size, or one more with asynchronous scheduling on MRV2."""
        return int(scheduler.vllm_config.max_concurrent_batches)

    def token_lag(self, scheduler: Any) -> int:
        """MRV2's ring: a stage takes the tokens of the step pp_size before; else the host does."""
        config = scheduler.vllm_config
        on_device = config.scheduler_config.async_scheduling and config.use_v2_model_runner
        pp_size = int(config.parallel_config.pipeline_parallel_size)
        return pp_size if on_device and pp_size > 1 else 0

    def add_request(self, scheduler: Any, spec: RequestSpec) -> None:
        """Make the vLLM request and queue it."""
        request = make_request(
            spec.request_id,
            spec.prompt,
            spec.max_tokens,
            spec.arrival_s,
            scheduler=scheduler,
            priority=spec.priority,
            lora_id=spec.lora_id,
            structured=spec.structured,
        )
        scheduler.add_request(request)

    def abort(self, scheduler: Any, request_ids: Sequence[str]) -> None:
        """As when clients disconnect."""
        scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def counts(self, scheduler: Any) -> tuple[int, int]:
        """Requests running, and waiting for whatever reason."""
        running, waiting = scheduler.get_request_counts()
        return running, waiting

    def plan(self, scheduler: Any, scheduler_output: Any) -> StepPlan:
        """See `plan_step`."""
        return plan_step(scheduler, scheduler_output)

    def grammar(self, scheduler: Any, scheduler_output: Any) -> dict[str, int] | None:
        """The token each structured row samples now, one that its grammar allows."""
        grammar = scheduler.get_grammar_bitmask(scheduler_output)
        if grammar is None:
            return None
        drafts = scheduler_output.scheduled_spec_decode_tokens
        ids = grammar.structured_output_request_ids
        heights = [1 + len(drafts.get(request_id, ())) for request_id in ids]
        rows = len(grammar.grammar_bitmask)
        if rows != sum(heights):  # since 0.33 every request has room for all its drafts
            heights = [rows // len(ids)] * len(ids)
        tokens, row = {}, 0
        for request_id, height in zip(ids, heights, strict=True):
            position = scheduler.requests[request_id].num_output_tokens
            wanted = self._sample(request_id, position)
            tokens[request_id] = _allowed_token(grammar.grammar_bitmask[row], wanted)
            row += height
        return tokens

    def model_output(
        self, scheduler: Any, scheduler_output: Any, plan: StepPlan, grammar: Any
    ) -> Any:
        """See `model_output`."""
        return model_output(
            scheduler_output,
            scheduler,
            self._sample,
            plan=plan,
            accept=self._accept,
            grammar_tokens=grammar,
        )

    def collect(
        self, scheduler: Any, plan: StepPlan, outputs: Any
    ) -> list[tuple[str, list[int], bool]]:
        """Rows of every client; then, as the synchronous engine does, hand over new drafts."""
        if scheduler.num_spec_tokens and not scheduler.scheduler_config.async_scheduling:
            self._propose(scheduler, plan)
        return [
            (row.request_id, row.new_token_ids, row.finish_reason is not None)
            for client in outputs.values()
            for row in client.outputs
        ]

    def _propose(self, scheduler: Any, plan: StepPlan) -> None:
        alive = [rid for rid in plan.sampling if rid in scheduler.requests]
        drafts = []
        for request_id in alive:
            start = scheduler.requests[request_id].num_output_tokens
            count = scheduler.num_spec_tokens
            drafts.append([self._sample(request_id, start + i) for i in range(count)])
        scheduler.update_draft_token_ids(DraftTokenIds(alive, drafts))


def _allowed_token(bitmask: Any, wanted: int) -> int:
    """The allowed token nearest above `wanted` (cyclic), EOS only when nothing else is left."""
    words = [int(word) & 0xFFFFFFFF for word in bitmask]
    order = [*range(wanted, VOCABULARY), *range(wanted)]
    allowed = [t for t in order if words[t // 32] >> t % 32 & 1]
    if not allowed:
        raise ValueError("the grammar allows no token")
    return next((token for token in allowed if token != EOS), EOS)
