"""vLLM's engine in this process with random weights, driven turn by turn in real time."""

import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.workloads import BenchRequest


class LiveEngine:
    """vLLM's engine in this process, its workers in their own; the scheduler is at hand."""

    def __init__(self, model: Path, pp_size: int, tp_size: int, options: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        arguments = {
            "model": str(model),
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "pipeline_parallel_size": pp_size,
            "tensor_parallel_size": tp_size,
            "distributed_executor_backend": "mp",
            "max_num_batched_tokens": 8192,
            "max_num_seqs": 512,
            "max_model_len": 32768,
            "enable_prefix_caching": False,
            "scheduler_cls": "vllm_ppbalance.Scheduler",
            **options,
        }
        self.engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self._number = 0

    @property
    def busy(self) -> bool:
        """Whether there is a request, or a micro-batch in flight."""
        return bool(self.scheduler.has_requests() or self.core.batch_queue)

    def on_workers(self, function: Any) -> list[Any]:
        """What `function(worker)` gives in each worker."""
        answers: list[Any] = self.core.model_executor.collective_rpc(function)
        return answers

    def step(self) -> list[tuple[str, int, bool]]:
        """One turn of the engine: (request id, new tokens, finished) of each row with output."""
        outputs, executed = self.core.step_fn()
        self.core.post_step(executed)
        return [
            (row.request_id, len(row.new_token_ids), row.finish_reason is not None)
            for client in (outputs or {}).values()
            for row in client.outputs
        ]

    def add(self, request: BenchRequest, arrival_s: float) -> str:
        """Hand a request to the engine; its arrival is `arrival_s` on the wall clock."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        self._number += 1
        name = f"{request.request_id}-{self._number}"
        vocabulary = self.scheduler.vllm_config.model_config.get_vocab_size()
        rng = np.random.RandomState(self._number)
        self.scheduler.add_request(
            Request(
                request_id=name,
                prompt_token_ids=rng.randint(0, vocabulary, request.prompt_tokens).tolist(),
                sampling_params=SamplingParams(
                    max_tokens=request.output_tokens, ignore_eos=True, temperature=0.0
                ),
                pooling_params=None,
                arrival_time=arrival_s,
            )
        )
        return name

    def use(self, setting: dict[str, Any]) -> None:
        """Change the scheduler's settings; the engine must be idle.

        `stock` is a token budget of vLLM's own scheduling, `ppbalance` our settings, `running` how
        many requests run at most. An engine without our scheduler takes no `ppbalance`.
        """
        scheduler, budget = self.scheduler, setting.get("stock")
        most = scheduler.vllm_config.scheduler_config.max_num_seqs
        scheduler.max_num_running_reqs = setting.get("running", most)
        if not hasattr(scheduler, "ppbalance"):
            if budget is None:
                raise ValueError(f"{setting}: not our scheduler: only a stock budget can be set")
            scheduler.max_num_scheduled_tokens = budget
            return
        scheduler.ppbalance_failed = budget is not None
        scheduler._stock_budget = budget or 8192
        scheduler.max_num_scheduled_tokens = scheduler._stock_budget
        if budget is None:
            self._renew(setting.get("ppbalance", {}))

    def _renew(self, own: dict[str, Any]) -> None:
        from vllm_ppbalance.admission import OnTimeFirst
        from vllm_ppbalance.controller import Controller
        from vllm_ppbalance.reader import cadence, smallest_budget
        from vllm_ppbalance.sources import load_settings
        from vllm_ppbalance.telemetry import start_telemetry

        scheduler = self.scheduler
        if scheduler.telemetry is not None:
            scheduler.telemetry.close()
        old, settings = scheduler.ppbalance, load_settings({"ppbalance": own}, {}).settings
        new = Controller(settings, old.pp_size, cadence(scheduler.vllm_config))
        new.budget_floor = smallest_budget(scheduler)
        if settings.admission.strategy == "on_time":
            new.admission = OnTimeFirst(settings)
        if old.saver is not None and old.cost_model is not None:
            new.use_model(old.cost_model, old.saver.store)
        scheduler.ppbalance = new
        scheduler.telemetry = start_telemetry(new, scheduler.vllm_config)


def finish_profile(live: LiveEngine, limit_s: float = 60.0) -> dict[str, Any]:
    """Let the plugin measure the stages at start; what it found, and how long it took."""
    if not hasattr(live.scheduler, "ppbalance"):
        return {}
    started = time.monotonic()
    while live.scheduler._profile_run is not None and time.monotonic() - started < limit_s:
        live.step()
    while live.busy:
        live.step()
    own = live.scheduler.ppbalance
    model = own.cost_model
    table = {} if model is None else {n: model.predict(n, ((n, 0),), 0, 0) for n in TABLE_TOKENS}
    return {"seconds": time.monotonic() - started, "stage_s": table}


TABLE_TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
