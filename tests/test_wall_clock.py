"""The wall-clock pipeline's parts that need no vLLM: timeline, stage thread, tokens, arguments."""

import json
import queue
import random
import threading
import time
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer

from bench.batch import BatchShape
from bench.latency import load_profile
from bench.pipeline import LINKS, Activations, Pipeline
from bench.pipeline_overhead import CALIBRATED
from bench.policies import parse_policy
from bench.stages import stage_time
from bench.wall_clock import model
from bench.wall_clock.device import Device, StageFailedError
from bench.wall_clock.launch import Deployment
from bench.wall_clock.requests import Requests
from bench.wall_clock.settings import WallClockSettings
from bench.wall_clock.timeline import StageTimeline
from bench.wall_clock.tokens import EOS, allowed_token, prompt_digest, token_at

PROFILE = "h200_qwen2.5-32b"


def batches(count=300, seed=0):
    rng = random.Random(seed)
    now_s = 0.0
    for _ in range(count):
        now_s += rng.expovariate(100.0)
        prefills = ((rng.randint(1, 4096), rng.randint(0, 8192)),) * rng.randint(0, 2)
        decodes = rng.randint(1, 128)
        yield now_s, BatchShape(prefills, decodes, decodes, 700 * decodes)


def test_a_chain_of_timelines_says_what_the_virtual_pipeline_says():
    profile, layers = load_profile(PROFILE), (17, 16, 16, 15)
    activations, link = Activations(profile.hidden_size), LINKS["net100g"]

    def stages():
        return [stage_time(profile, layers, i, CALIBRATED[PROFILE]) for i in range(4)]

    pipeline = Pipeline(stages(), links=link, activations=activations)
    *before, last = stages()
    chain = [*(StageTimeline(s, link, activations) for s in before), StageTimeline(last)]
    for step, (ready_s, shape) in enumerate(batches()):
        done_s = pipeline.submit(step, shape, ready_s)
        for timeline in chain:
            ready_s = timeline.run(shape, ready_s).arrives_s
        assert ready_s == done_s


class Mailbox:
    """Hand-overs inside one process."""

    def __init__(self, before, after, tokens):
        self.before, self.after, self.tokens = before, after, tokens

    def receive(self):
        return self.before.get(timeout=10)

    def send(self, step, arrives_s):
        self.after.put((step, arrives_s))

    def receive_tokens(self):
        return self.tokens.get(timeout=10)

    def send_tokens(self, step, sampled_s):
        self.tokens.put((step, sampled_s))


def devices(stage_s, num_stages, token_lag=0, on_failure=lambda: None):
    between = [queue.Queue() for _ in range(num_stages)]
    tokens = queue.Queue()
    made = [
        Device(
            i,
            num_stages,
            StageTimeline(lambda _: stage_s),
            Mailbox(between[i - 1], between[i], tokens),
            token_lag,
            on_failure,
        )
        for i in range(num_stages)
    ]
    return made, tokens


ONE_DECODE = BatchShape((), 1, 1, 10)


def test_stages_overlap_and_lateness_does_not_add_up():
    """40 steps of 4 stages of 5 ms: 43 stage times, whatever each sleep is late by."""
    stages, _ = devices(0.005, 4)
    started_s = time.monotonic()
    works = [[s.submit(ONE_DECODE, started_s, True) for s in stages][-1] for _ in range(40)]
    for work in works:
        work.wait()
    elapsed_s = time.monotonic() - started_s
    for stage in stages:
        stage.close()
    assert 43 * 0.005 <= elapsed_s < 43 * 0.005 + 0.05


def test_a_step_waits_for_the_tokens_it_feeds_on_and_an_empty_one_takes_them_too():
    stages, tokens = devices(0.002, 2, token_lag=2)
    shapes = [ONE_DECODE, BatchShape(), BatchShape(), BatchShape(), ONE_DECODE, ONE_DECODE]
    works = []
    for shape in shapes:
        submitted_s = time.monotonic()
        works = [s.submit(shape, submitted_s, bool(shape.num_tokens)) for s in stages]
    works[-1].wait()
    works[0].wait()
    assert tokens.qsize() == 2  # of the last two steps: no step came yet to feed on them
    for stage in stages:
        stage.close()


def test_a_failing_stage_is_told_and_does_not_hang():
    failed = threading.Event()
    stages, _ = devices(None, 1, on_failure=failed.set)  # None seconds: adding them raises
    work = stages[0].submit(ONE_DECODE, 0.0, True)
    with pytest.raises(StageFailedError, match="step 0"):
        work.wait()
    assert failed.wait(10)


def test_tokens_depend_on_prompt_and_position_only(tmp_path):
    digest = prompt_digest([1, 2, 3])
    tokens = [token_at(digest, i) for i in range(2000)]
    assert tokens == [token_at(prompt_digest((1, 2, 3)), i) for i in range(2000)]
    assert tokens[:50] != [token_at(prompt_digest([1, 2, 4]), i) for i in range(50)]
    folder = model.make(tmp_path / "m", load_profile(PROFILE))
    text = Tokenizer.from_file(str(folder / "tokenizer.json")).decode(tokens)
    assert len(text) == 2000
    assert text.isascii()
    assert text.isprintable()
    names = json.loads((folder / "config.json").read_text())
    assert names["eos_token_id"] == EOS
    assert EOS not in tokens


def test_the_model_folder_has_the_shape_of_its_profile(tmp_path):
    for name in model.SHAPES:
        profile = load_profile(name)
        config = json.loads((model.make(tmp_path / name, profile) / "config.json").read_text())
        assert config["num_hidden_layers"] == profile.num_hidden_layers
        # 4096 bytes of keys and values a token and layer, as `bench simulate` takes them.
        assert 2 * config["num_key_value_heads"] * config["head_dim"] * 2 == 4096


def test_grammars_are_obeyed():
    def mask(*allowed):
        words = [0] * 4
        for token in allowed:
            words[token // 32] |= 1 << token % 32
        return [word - (1 << 32) if word >> 31 else word for word in words]

    assert allowed_token(mask(5, 31, 70), 6) == 31
    assert allowed_token(mask(5, 31, 70), 71) == 5
    assert allowed_token(mask(EOS, 40), 1) == 40
    assert allowed_token(mask(EOS), 40) == EOS
    with pytest.raises(ValueError, match="no token"):
        allowed_token(mask(), 3)


def output(new=(), cached=(), scheduled=None, finished=()):
    return SimpleNamespace(
        scheduled_new_reqs=list(new),
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[name for name, _ in cached],
            num_computed_tokens=[computed for _, computed in cached],
        ),
        num_scheduled_tokens=scheduled or {},
        finished_req_ids=set(finished),
    )


def new_request(name, prompt, computed=0, known=None):
    return SimpleNamespace(
        req_id=name,
        prompt_token_ids=prompt,
        prefill_token_ids=known,
        num_computed_tokens=computed,
    )


def test_requests_are_followed_through_chunks_decodes_and_preemption():
    requests, prompt = Requests(samples=True), list(range(100))
    digest = prompt_digest(prompt)
    first = requests.step(output(new=[new_request("a", prompt)], scheduled={"a": 60}))
    assert first.shape == BatchShape(((60, 0),))
    assert first.sampled == {}
    second = requests.step(output(cached=[("a", 60)], scheduled={"a": 40}))
    assert second.sampled == {"a": token_at(digest, 0)}
    decode = requests.step(output(cached=[("a", 100)], scheduled={"a": 1}))
    assert decode.shape == BatchShape((), 1, 1, 101)
    assert decode.sampled == {"a": token_at(digest, 1)}
    # Model Runner V1 resumes it in place, V2 as a new request with all its tokens.
    again = requests.step(output(cached=[("a", 0)], scheduled={"a": 101}))
    assert again.shape.prefills == ((101, 0),)
    assert again.sampled == {}
    known = [*prompt, 7, 7]
    resumed = requests.step(output(new=[new_request("a", prompt, 0, known)], scheduled={"a": 102}))
    assert resumed.sampled == {"a": token_at(digest, 2)}
    requests.step(output(finished=["a"]))
    assert len(requests) == 0


def deployment(tmp_path, policy="stock:512", **fields):
    return Deployment(parse_policy(policy), tmp_path, **fields)


def test_arguments_of_stock_and_of_ours(tmp_path):
    stock = deployment(tmp_path).arguments()
    assert stock[stock.index("--max-num-batched-tokens") + 1] == "512"
    assert "--scheduler-cls" not in stock
    assert "ppbalance" not in deployment(tmp_path).additional_config()
    ours = deployment(tmp_path, "ours:alp/even_share", mode="sync")
    assert "vllm_ppbalance.Scheduler" in ours.arguments()
    assert "--no-async-scheduling" in ours.arguments()
    own = ours.additional_config()["ppbalance"]
    assert own["chunk"] == {"strategy": "alp"}
    assert own["profiling"]["directory"].endswith(f"{PROFILE}-pp4-nvlink-sync")


def test_the_command_line_says_the_whole_deployment(tmp_path):
    from bench.wall_clock.serve import deployment as parsed
    from bench.wall_clock.serve import parser

    asked = deployment(
        tmp_path,
        "ours:greedy/even_share,slo_ttft=3.0",
        settings=WallClockSettings(link="pcie5", kv_cache_gib=3.5, pipeline_overhead=False),
        pp_size=2,
        mode="sync",
        max_num_seqs=7,
        max_model_len=4096,
        stage_layers=(33, 31),
        prefix_caching=True,
    )
    read = parsed(parser().parse_args(asked.words()))
    assert read.arguments() == asked.arguments()
    assert read.environment() == asked.environment()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"link": "string"}, r"wall_clock\.link = 'string': there are: nvlink"),
        ({"kv_cache_gib": 0}, r"wall_clock\.kv_cache_gib = 0: .*greater than 0"),
        ({"profile": "b300"}, r"wall_clock\.profile = 'b300': .*a100_codellama-34b"),
        ({"gpu": "x"}, r"wall_clock\.gpu = 'x'"),
    ],
)
def test_wrong_settings_name_field_value_and_bound(fields, words):
    with pytest.raises(ValueError, match=words):
        WallClockSettings.of({"wall_clock": fields})


def test_wrong_deployments_are_errors(tmp_path):
    with pytest.raises(ValueError, match="budget 9000 must be at most"):
        deployment(tmp_path, "stock:9000")
    with pytest.raises(ValueError, match="must be 2 numbers that sum to 64"):
        deployment(tmp_path, pp_size=2, stage_layers=(1, 1))
    with pytest.raises(ValueError, match="must be stock or ours"):
        deployment(tmp_path, "ppas")
