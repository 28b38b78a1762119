import dataclasses

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from bench import arrivals, lengths
from bench.trace_files import read_azure, read_mooncake, read_sharegpt
from bench.workloads import (
    WORKLOADS,
    BenchRequest,
    WorkloadSpec,
    build,
    h200x2_pp2,
    prompt_token_ids,
    workload_hash,
)
from tests.shared_data import data_file

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:47.6805900,396,3000
2023-11-16 18:15:50.6805900,100,7"""


@pytest.fixture
def azure(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    return path


def spec(name="azure_conv", **changes):
    return WorkloadSpec(name, **changes)


def shapes(requests):
    return [(r.arrival_s, r.prompt_tokens, r.output_tokens) for r in requests]


def test_trace_keeps_its_times_and_lengths(azure):
    assert shapes(build(spec(path=azure))) == [(0.0, 374, 44), (1.0, 396, 3000), (4.0, 100, 7)]


def test_speed_divides_the_gaps_and_a_window_starts_at_zero(azure):
    fast = build(spec(path=azure, speed=4.0, window=(1.0, 4.5)))
    slow = build(spec(path=azure, speed=0.5, window=(0.0, 4.0)))
    assert shapes(fast) == [(0.0, 396, 3000), (0.75, 100, 7)]
    assert shapes(slow) == [(0.0, 374, 44), (2.0, 396, 3000)]


def test_swapped_exchanges_lengths_before_the_cap(azure):
    swapped = build(spec("azure_swapped", path=azure, max_output_tokens=200))
    assert shapes(swapped) == [(0.0, 44, 200), (1.0, 3000, 200), (4.0, 7, 100)]


def test_recipe_of_the_real_runs(azure):
    times = np.random.RandomState(1).exponential(1 / 1.5, 3).cumsum()
    expected = list(zip(times.tolist(), (374, 396, 100), (44, 2000, 7), strict=True))
    assert shapes(h200x2_pp2(azure, 1.5, 2.0)) == expected


def test_recipe_on_the_real_file():
    path = data_file("azure", "AzureLLMInferenceTrace_conv.csv")
    requests = h200x2_pp2(path, 6, 20, swapped=True)
    assert len(requests) == 120
    times = np.random.RandomState(1).exponential(1 / 6, 120).cumsum()
    assert [r.arrival_s for r in requests] == times.tolist()
    assert (requests[0].prompt_tokens, requests[0].output_tokens) == (44, 374)


def test_sampling_keeps_a_seeded_share():
    rows = arrivals.replay(range(10_000), sample_ratio=0.25, seed=3)
    assert rows == arrivals.replay(range(10_000), sample_ratio=0.25, seed=3)
    assert 2300 < len(rows) < 2700


@given(
    st.lists(st.floats(0.0, 100.0), max_size=30),
    st.floats(0.1, 10.0),
    st.floats(0.0, 50.0),
    st.floats(1.0, 50.0),
)
def test_replay_is_ordered_and_within_the_squeezed_window(trace, speed, start, length):
    times = [at for _, at in arrivals.replay(trace, (start, start + length), speed)]
    assert times == sorted(times)
    assert all(0.0 <= at <= length / speed * (1 + 1e-9) for at in times)


def test_arrival_processes_have_the_asked_rate_and_burstiness():
    smooth = np.diff(arrivals.poisson(5.0, 20_000, seed=0))
    bursts = np.diff(arrivals.gamma(5.0, 20_000, cv=3.0, seed=0))
    even = np.diff(arrivals.constant(5.0, 50))
    assert [gaps.mean() for gaps in (smooth, bursts, even)] == pytest.approx([0.2] * 3, rel=0.05)
    assert smooth.std() / smooth.mean() == pytest.approx(1.0, rel=0.05)
    assert bursts.std() / bursts.mean() == pytest.approx(3.0, rel=0.1)
    assert even.std() == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: arrivals.poisson(0.0, 1, 0), "rate = 0.0"),
        (lambda: arrivals.gamma(1.0, 1, -1.0, 0), "cv = -1.0"),
        (lambda: arrivals.replay([0.0], speed=0.0), "speed = 0.0"),
        (lambda: arrivals.replay([0.0], sample_ratio=1.5), "sample_ratio = 1.5"),
        (lambda: arrivals.replay([0.0], window=(5.0, 5.0)), r"window = 5\.0 5\.0"),
        (lambda: build(spec("azur")), "'azur' is unknown.*azure_conv"),
        (lambda: build(spec("cnn", path="x", num_prompts=1)), "'cnn' is synthetic"),
        (lambda: build(spec("cnn", num_prompts=1)), "'cnn' has no rate of its own"),
        (lambda: build(spec("azure_conv", arrival="trace")), "no times of its own"),
        (lambda: build(spec("azure_conv")), "num_prompts or window"),
        (lambda: build(spec("mooncake", rate=1.0, num_prompts=1)), "needs the path"),
        (lambda: build(spec("cnn", rate=1.0, num_prompts=1, arrival="never")), "'never'"),
        (lambda: lengths.uniform(1, 0, (5, 4), (1, 1)), "prompt_range = 5 4"),
    ],
)
def test_wrong_settings_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("2023-11-16 18:15:51.0,abc,7", r"azure\.csv:5: .*'abc'"),
        ("2023-11-16 18:15:51.0,5,0", r"azure\.csv:5: .*0 output tokens"),
        ("yesterday,5,5", r"azure\.csv:5: .*yesterday"),
        ("2023-11-16 18:15:51.0", r"azure\.csv:5: "),
    ],
)
def test_bad_line_of_a_trace_is_named(azure, line, message):
    azure.write_text(f"{AZURE}\n{line}\n")
    with pytest.raises(ValueError, match=message):
        read_azure(azure)


def test_missing_column_and_empty_file_are_named(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("TIMESTAMP,Context\n2023-11-16 18:15:51.0,3\n")
    with pytest.raises(ValueError, match=r"t\.csv:2: no column 'ContextTokens'"):
        read_azure(path)
    path.write_text("")
    with pytest.raises(ValueError, match=r"t\.csv: holds no requests"):
        read_azure(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "t.jsonl:2: "),
        ('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}', "must be 2"),
    ],
)
def test_bad_mooncake_line_is_named(tmp_path, line, message):
    path = tmp_path / "t.jsonl"
    good = '{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1]}'
    path.write_text(f"{good}\n{line}\n")
    with pytest.raises(ValueError, match=message):
        read_mooncake(path)


def test_equal_hash_ids_give_equal_blocks_and_nothing_else_does():
    a = BenchRequest("a", 0.0, 1100, 1, hash_ids=(0, 7, 9))
    b = BenchRequest("b", 0.0, 1500, 1, hash_ids=(0, 8, 9))
    ids_a, ids_b = prompt_token_ids(a), prompt_token_ids(b)
    assert (len(ids_a), len(ids_b)) == (1100, 1500)
    assert ids_a[:512] == ids_b[:512]
    assert ids_a[512:1024] != ids_b[512:1024]
    assert ids_a[1024:] == ids_b[1024:1100]


@given(st.integers(512, 200_000), st.integers(0, 2**41), st.integers(0, 2**41))
def test_token_ids_fit_the_vocabulary_and_tell_blocks_apart(vocab_size, one, other):
    first, second = (
        prompt_token_ids(BenchRequest("r", 0.0, 512, 1, hash_ids=(h,)), vocab_size)
        for h in (one, other)
    )
    assert max(first) < vocab_size
    assert (first == second) == (one == other)


def test_requests_without_hash_ids_share_no_block():
    prompts = [prompt_token_ids(BenchRequest(f"req-{i}", 0.0, 600, 1)) for i in range(50)]
    assert len({tuple(ids[:512]) for ids in prompts}) == 50


def test_tiny_vocabulary_is_refused():
    with pytest.raises(ValueError, match="vocab_size = 100"):
        prompt_token_ids(BenchRequest("r", 0.0, 1, 1), 100)


def test_mooncake_prefixes_are_shared():
    path = data_file("mooncake", "conversation_trace.jsonl")
    first, second = build(spec("mooncake", path=path, num_prompts=2))
    assert prompt_token_ids(first)[:512] == prompt_token_ids(second)[:512]
    assert len(prompt_token_ids(second)) == second.prompt_tokens


NEEDS_NO_FILE = [n for n in WORKLOADS if n not in ("azure_code", "mooncake")]


@pytest.mark.parametrize("name", NEEDS_NO_FILE)
def test_same_seed_same_hash_without_any_file(name):
    wanted = spec(name, rate=2.0, num_prompts=50, seed=4)
    requests = build(wanted)
    other = build(dataclasses.replace(wanted, seed=5))
    assert workload_hash(requests) == workload_hash(build(wanted))
    assert workload_hash(requests) != workload_hash(other)
    assert len(requests) == 50
    assert all(r.prompt_tokens >= 1 and r.output_tokens >= 1 for r in requests)


def test_hash_sees_every_field():
    request = BenchRequest("a", 0.0, 1, 1)
    changed = [
        dataclasses.replace(request, **change)
        for change in (
            {"request_id": "b"},
            {"arrival_s": 0.5},
            {"prompt_tokens": 2},
            {"output_tokens": 2},
            {"hash_ids": (1,)},
            {"priority": 1},
        )
    ]
    assert len({workload_hash([r]) for r in (request, *changed)}) == 7


def test_window_and_speed_draw_as_many_requests_as_the_trace_holds():
    requests = build(spec("azure_conv", window=(0.0, 400.0), speed=4.0))
    assert len(requests) == int(5.5304 * 400)
    assert requests[-1].arrival_s == pytest.approx(100.0, rel=0.1)


def test_cnn_has_the_published_means_and_its_reverse_swaps_them():
    articles, highlights = np.mean(lengths.cnn(20_000, 0), axis=0)
    assert (articles, highlights) == pytest.approx((781 * 1.3, 56 * 1.3), rel=0.02)
    forward = build(spec("cnn", rate=1.0, num_prompts=9))
    back = build(spec("cnn_r", rate=1.0, num_prompts=9))
    assert [(r.prompt_tokens, r.output_tokens) for r in forward] == [
        (r.output_tokens, r.prompt_tokens) for r in back
    ]


def test_long_context_stays_in_range_and_favours_no_octave():
    prompts = np.array(lengths.long_context(8000, 0))[:, 0]
    assert prompts.min() >= 8192
    assert prompts.max() <= 131072
    shares = [((prompts >= low) & (prompts < 2 * low)).mean() for low in (8192, 16384, 65536)]
    assert shares == pytest.approx([0.25] * 3, abs=0.02)


def test_uniform_reaches_both_ends():
    pairs = lengths.uniform(500, 0, (3, 5), (1, 2))
    assert {p for p, _ in pairs} == {3, 4, 5}
    assert {o for _, o in pairs} == {1, 2}


@pytest.mark.parametrize(
    ("name", "read", "parts"),
    [
        ("azure_conv", read_azure, ("azure", "AzureLLMInferenceTrace_conv.csv")),
        (
            "sharegpt",
            read_sharegpt,
            ("sharegpt", "sharegpt_8k_filtered_stats_llama2_tokenizer.csv"),
        ),
    ],
)
def test_committed_percentiles_are_those_of_the_file(name, read, parts):
    rows = read(data_file(*parts))
    model = lengths.load_model(name)
    assert model["prompt_percentiles"] == lengths.length_percentiles(
        [r.prompt_tokens for r in rows]
    )
    assert model["output_percentiles"] == lengths.length_percentiles(
        [r.output_tokens for r in rows]
    )


def test_committed_models_name_source_and_licence():
    folder = lengths.__file__.replace("bench/lengths.py", "configs/lengths")
    for name in ("azure_conv", "sharegpt"):
        with open(f"{folder}/{name}.yaml", encoding="utf-8") as file:
            model = yaml.safe_load(file)
        assert model["source"]
        assert model["licence"]


def test_drawn_lengths_follow_the_percentiles():
    model = lengths.load_model("azure_conv")
    prompts, outputs = np.array(lengths.from_percentiles(model, 40_000, 1)).T
    assert np.median(prompts) == pytest.approx(model["prompt_percentiles"][50], rel=0.02)
    assert np.percentile(outputs, 90) == pytest.approx(model["output_percentiles"][90], rel=0.02)
