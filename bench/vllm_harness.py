"""vLLM's real schedulers without a model or a GPU: all that the simulator imports of vllm.

Nothing is downloaded and nothing is computed: the config is a file written on the spot, and the
model runner is a function that answers with deterministic tokens.
"""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar
from zlib import crc32

import torch
from vllm import ModelRegistry
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from bench.batch import BatchShape
from bench.engine import RequestSpec, StepPlan

Sample = Callable[[str, int], int]
Accept = Callable[[str, int], int]

VOCABULARY = 512
EOS = 2
_REGEX = "[ab]*"  # never complete, so that structured requests run to max_tokens
_CONFIG = {
    "architectures": ["HarnessForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1 << 20,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": EOS,
}


class _HarnessModel(torch.nn.Module):  # type: ignore[misc]
    """Says what it supports and computes nothing.

    vLLM asks the model's class; for one of its own it starts a process that takes 20 s and more.
    """

    supports_pp = True
    supports_lora = True
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {}
    embedding_modules: ClassVar[dict[str, str]] = {}

    def __init__(self, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()

    def embed_input_ids(self, input_ids: Any) -> Any:
        raise NotImplementedError

    def forward(self, input_ids: Any, positions: Any, intermediate_tensors: Any = None) -> Any:
        raise NotImplementedError

    def compute_logits(self, hidden_states: Any) -> Any:
        raise NotImplementedError

    def make_empty_intermediate_tensors(self, batch_size: int, dtype: Any, device: Any) -> Any:
        raise NotImplementedError


ModelRegistry.register_model("HarnessForCausalLM", _HarnessModel)


def sample_token(request_id: str, position: int) -> int:
    """The token a request gets at an output position, whatever the schedule; never EOS."""
    return 3 + crc32(f"{request_id}/{position}".encode()) % (VOCABULARY - 3)


def accept_all_but_every_third(_request_id: str, position: int) -> int:
    """Draft tokens accepted at an output position: many, then one, then none, in turn."""
    return (1 << 10, 1, 0)[position % 3]


@cache
def _model_dir(with_tokenizer: bool) -> "tempfile.TemporaryDirectory[str]":
    """A folder with config.json that lives as long as the process; a tokenizer if asked for."""
    folder = tempfile.TemporaryDirectory(prefix="vllm-harness-")
    path = Path(folder.name)
    (path / "config.json").write_text(json.dumps(_CONFIG))
    if with_tokenizer:
        from tokenizers import Tokenizer, decoders
        from tokenizers.models import WordLevel
        from transformers import PreTrainedTokenizerFast

        make: Any = PreTrainedTokenizerFast

        words = ["<unk>", "<bos>", "<eos>", *"abcdefgh"]
        words += [f"w{i}" for i in range(len(words), VOCABULARY)]
        vocabulary = {word: i for i, word in enumerate(words)}
        tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
        tokenizer.decoder = decoders.ByteLevel()  # tells xgrammar how to read the words
        make(
            tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<bos>", eos_token="<eos>"
        ).save_pretrained(path)
    return folder


@cache
def _with_runner(v2: bool) -> type[Any]:
    """VllmConfig with the model runner's version fixed: without a GPU vLLM would say V1."""
    fixed = property(lambda _self: v2)
    return type("HarnessVllmConfig", (VllmConfig,), {"use_v2_model_runner": fixed})


def build_scheduler(
    scheduler_cls: Callable[..., Any] | None = None,
    *,
    pp_size: int = 1,
    async_scheduling: bool = False,
    v2_model_runner: bool = False,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 2048,
    max_model_len: int = 8192,
    block_size: int = 16,
    num_gpu_blocks: int = 1 << 16,
    prefix_caching: bool = False,
    policy: str = "fcfs",
    long_prefill_token_threshold: int = 0,
    num_draft_tokens: int = 0,
    max_loras: int = 0,
    structured_outputs: bool = False,
    additional_config: Mapping[str, Any] | None = None,
    log_stats: bool = False,
) -> Any:
    """A scheduler as `EngineCore` would build it; vLLM's own class when `scheduler_cls` is None.

    `num_draft_tokens` turns on n-gram speculation, `structured_outputs` real grammars (xgrammar).
    Bad values raise what vLLM raises for them.
    """
    model_config = ModelConfig(
        model=_model_dir(structured_outputs).name,
        skip_tokenizer_init=not structured_outputs,
        dtype="bfloat16",
        max_model_len=max_model_len,
    )
    scheduler_config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
        policy=policy,
        long_prefill_token_threshold=long_prefill_token_threshold,
        async_scheduling=False,
    )
    parallel_config = ParallelConfig(
        pipeline_parallel_size=pp_size, distributed_executor_backend="mp"
    )
    vllm_config = VllmConfig(
        model_config=model_config,
        scheduler_config=scheduler_config,
        cache_config=CacheConfig(block_size=block_size, enable_prefix_caching=prefix_caching),
        parallel_config=parallel_config,
        device_config=DeviceConfig(device="cpu"),
        speculative_config=_speculation(num_draft_tokens, model_config, parallel_config),
        lora_config=LoRAConfig(max_loras=max_loras, max_lora_rank=8) if max_loras else None,
        additional_config=dict(additional_config or {}),
    )
    # Set after construction: on a CPU vLLM turns asynchronous scheduling off.
    vllm_config.scheduler_config.async_scheduling = async_scheduling
    vllm_config.cache_config.num_gpu_blocks = num_gpu_blocks
    vllm_config.__class__ = _with_runner(v2_model_runner)
    if scheduler_cls is None:
        scheduler_cls = AsyncScheduler if async_scheduling else Scheduler
    return scheduler_cls(
        vllm_config=vllm_config,
        kv_cache_config=_kv_cache_config(block_size, num_gpu_blocks),
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=block_size,
        log_stats=log_stats,
    )


def _speculation(num_draft_tokens: int, model: Any, parallel: Any) -> Any:
    if not num_draft_tokens:
        return None
    return SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=num_draft_tokens,
        prompt_lookup_min=1,
        prompt_lookup_max=3,
        target_model_config=model,
        target_parallel_config=parallel,
    )


def _kv_cache_config(block_size: int, num_blocks: int) -> Any:
    spec = FullAttentionSpec(
        block_size=block_size, num_kv_heads=2, head_size=16, dtype=torch.bfloat16
    )
    groups = [KVCacheGroupSpec(layer_names=["layer"], kv_cache_spec=spec)]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


@cache
def _block_hasher(block_size: int, algorithm: str) -> Any:
    hash_fn = get_hash_fn_by_name(algorithm)
    init_none_hash(hash_fn)
    return get_request_block_hasher(block_size, hash_fn)


def prompt_tokens(request_id: str, length: int) -> list[int]:
    """`length` token ids whose first ones tell requests apart, so that no prefix is shared."""
    tokens = [7] * length
    digest = crc32(request_id.encode())
    for i in range(min(length, 4)):
        tokens[i] = 3 + (digest >> 8 * i & 0xFF)
    return tokens


def make_request(
    request_id: str,
    prompt: int | Sequence[int],
    max_tokens: int,
    arrival_s: float = 0.0,
    *,
    scheduler: Any = None,
    priority: int = 0,
    lora_id: int = 0,
    structured: bool = False,
) -> Any:
    """A vLLM `Request` that stops at `max_tokens` only; `prompt` is token ids or their number.

    With `scheduler`, prompt blocks are hashed when its prefix cache is on, and the grammar of a
    `structured` request is compiled before this returns: a background thread is no virtual time.
    """
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    if structured:
        params.structured_outputs = StructuredOutputsParams(regex=_REGEX)
        params.structured_outputs._backend = "xgrammar"
    hasher = None
    if scheduler is not None and scheduler.cache_config.enable_prefix_caching:
        cache_config = scheduler.cache_config
        hasher = _block_hasher(scheduler.block_size, cache_config.prefix_caching_hash_algo)
    tokens = prompt_tokens(request_id, prompt) if isinstance(prompt, int) else list(prompt)
    request = Request(
        request_id=request_id,
        prompt_token_ids=tokens,
        sampling_params=params,
        pooling_params=None,
        arrival_time=arrival_s,
        priority=priority,
        lora_request=LoRARequest(f"lora{lora_id}", lora_id, "unused") if lora_id else None,
        block_hasher=hasher,
    )
    if structured:
        _compile_grammar(scheduler, request)
    return request


def _compile_grammar(scheduler: Any, request: Any) -> None:
    if scheduler is None:
        raise ValueError("a structured request needs the scheduler that compiles its grammar")
    scheduler.structured_output_manager.grammar_init(request)
    pending = request.structured_output_request._grammar
    if hasattr(pending, "result"):
        pending.result()


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
