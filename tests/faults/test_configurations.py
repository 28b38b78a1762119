"""Any configuration either works or is refused with a clear error; none hangs or loses a request.

BENCH_FAULTS=long tries 500, else some dozens.
"""

import math
import os
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

from pydantic import BaseModel

from bench.engine_types import RequestSpec
from tests.worlds import MODES, serve
from vllm_ppbalance.config import Settings
from vllm_ppbalance.sources import SettingsError, load_settings

pytestmark = pytest.mark.scheduler
EXAMPLES = 500 if os.environ.get("BENCH_FAULTS") == "long" else 40
NUMBERS = [1, 2, 3, 16, 128, 512, 4096, 0.5, 0.05, 0.9, 1.0, 0, -1, 1 << 31, 2.5, 1e-9, 1e9]
ODD = [None, True, "", "fast", [], {}, "128", math.nan, math.inf]


def knobs(model: type[BaseModel] = Settings, path: tuple[str, ...] = ()):
    """Each knob with the words it may be, if it is a word."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from knobs(kind, (*path, name))
        else:
            words = [word for word in _words(kind) if isinstance(word, str)]
            yield (*path, name), words


def _words(kind: Any):
    for part in get_args(kind):
        yield from [part] if isinstance(part, str) else _words(part)


KNOBS = dict(knobs())
# A port of this machine, and places on its disk: those have tests of their own.
for elsewhere in (("metrics_port",), ("trace",), ("profiling", "directory")):
    del KNOBS[elsewhere]


@st.composite
def settings_trees(draw):
    """Up to four knobs, most of them with a value that may be right."""
    tree: dict[str, Any] = {}
    for path in draw(st.lists(st.sampled_from(sorted(KNOBS)), max_size=4, unique=True)):
        likely = KNOBS[path] or NUMBERS
        value = draw(st.sampled_from(likely * 8 + ODD))
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = value
    chunk = draw(st.none() | st.sampled_from(KNOBS["chunk", "strategy"]))
    if chunk is not None:
        tree.setdefault("chunk", {}).setdefault("strategy", chunk)
    return tree


engines = st.fixed_dictionaries(
    {
        "pp_size": st.sampled_from([1, 2, 3, 4, 8]),
        "max_num_seqs": st.sampled_from([1, 2, 7, 64]),
        "max_num_batched_tokens": st.sampled_from([64, 100, 512, 8192]),
        "num_gpu_blocks": st.sampled_from([40, 100, 1024]),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "prefix_caching": st.booleans(),
        "long_prefill_token_threshold": st.sampled_from([0, 16]),
    }
)


def load():
    return [
        RequestSpec(f"r{i}", 0.003 * i, 1 + 97 * i % 380, 1 + 7 * i % 20, priority=i % 3)
        for i in range(12)
    ]


outcomes: Counter[str] = Counter()


@hypothesis_settings(max_examples=EXAMPLES)
@given(tree=settings_trees(), engine=engines, mode=st.sampled_from(sorted(MODES)))
def test_a_configuration_works_or_is_refused(tmp_path_factory, tree, engine, mode):
    folder = tmp_path_factory.mktemp("configuration")
    own = {**tree, "profiling": {"directory": str(folder), **tree.get("profiling", {})}}
    options = {**engine, **MODES[mode]}
    try:
        load_settings({"ppbalance": own}, {})
    except SettingsError as refusal:
        outcomes["refused"] += 1
        said = str(refusal)
    else:
        said = ""
    if said:
        assert any(path[-1] in said for path in KNOBS), said
        return
    ran = serve(load(), additional_config={"ppbalance": own}, until_s=600.0, **options)
    outcomes["served"] += 1
    assert all(record.finished for record in ran.result.requests.values())
    assert {name: len(tokens) for name, tokens in ran.tokens.items()} == {
        spec.request_id: spec.max_tokens for spec in load()
    }
    assert not ran.scheduler.requests
    assert not getattr(ran.scheduler, "ppbalance_failed", False)
    ran.scheduler.shutdown()


def test_both_outcomes_were_seen():
    print(dict(outcomes))
    assert min(outcomes["refused"], outcomes["served"]) >= EXAMPLES // 10


@pytest.mark.parametrize("mode", MODES)
def test_a_home_that_cannot_be_written_is_no_reason_to_stop(mode, monkeypatch, caplog):
    """The default places lie where nobody may write; nothing is saved, all are served."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/self/nowhere")
    monkeypatch.setenv("HOME", "/proc/self/nowhere")
    config = {"ppbalance": {"trace": "/proc/self/nowhere/steps.jsonl"}}
    late = [RequestSpec(f"r{i}", 60.0, 50, 5) for i in range(4)]  # after the stages are measured
    ran = serve(late, additional_config=config, pp_size=4, **MODES[mode])
    assert all(len(tokens) == 5 for tokens in ran.tokens.values())
    assert not ran.scheduler.ppbalance_failed
    ran.scheduler.shutdown()
    assert ran.scheduler.ppbalance.saver.error
    assert not Path("/proc/self/nowhere").exists()
