"""Run by test_llm.py: `llm_script.py MODEL REQUESTS RESULTS`, greedy tokens under each policy.

The last request is sent on its own, before the others, where the policy is for a lone prompt.
"""

import json
import os
import sys
from pathlib import Path

from tests.real.real_runs import combinations, is_for_lone_prompts, switch_to


def main() -> None:
    model, requests_file, results_file = sys.argv[1:]
    requests = json.loads(Path(requests_file).read_text())
    switch = Path(os.environ["SWITCH_FILE"])
    switch_to(switch, *next(combinations()))

    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype="float32",
        max_model_len=4096,
        pipeline_parallel_size=2,
        scheduler_cls="tests.real.switching.SwitchingScheduler",
        compilation_config={"mode": 1, "backend": "eager"},
    )
    prompts = [{"prompt_token_ids": request["prompt"]} for request in requests]
    params = [
        SamplingParams(temperature=0, max_tokens=request["max_tokens"], ignore_eos=True)
        for request in requests
    ]
    results = {}
    for name, settings in combinations():
        switch_to(switch, name, settings)
        outputs = []
        if is_for_lone_prompts(name):
            outputs = llm.generate(prompts[-1:], params[-1:], use_tqdm=False)
        outputs = llm.generate(prompts[:-1], params[:-1], use_tqdm=False) + outputs
        results[name] = [list(output.outputs[0].token_ids) for output in outputs]
    Path(results_file).write_text(json.dumps(results))


# The engine core is spawned and imports this file again.
if __name__ == "__main__":
    main()
