import json
import timeit
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from bench.batch import BatchShape
from bench.fit import main
from bench.fit_common import least_absolute
from bench.fit_host import decode_gaps, host_seconds, mean_decode_context
from bench.fit_rows import load_rows
from bench.fit_vidur import step_table
from bench.latency import FitError, LatencyProfile, load_profile
from tests.shared_data import data_file

CONFIGS = Path(__file__).resolve().parents[1] / "configs" / "latency_profiles"
PROFILES = [load_profile(str(path)) for path in sorted(CONFIGS.glob("*.yaml"))]


def fields(**changes):
    """A profile in round numbers: a layer takes 1 s up to 100 tokens, 2 s at 200."""
    profile = {
        "name": "round",
        "gpu": "none",
        "model": "none",
        "dtype": "bfloat16",
        "hidden_size": 8,
        "vocab_size": 16,
        "num_hidden_layers": 4,
        "layers_measured": 1,
        "source": "made up",
        "licence": "none",
        "host": {
            "contained_in_rows": False,
            "step_s": 0,
            "decode_s": 0,
            "new_request_s": 0,
            "note": "",
        },
        "fit": dict.fromkeys(FitError.model_fields, 1),
        "linear_table": [[1, 1.0], [100, 1.0], [101, 1.5], [200, 2.0]],
        "lm_head_table": [[1, 0.25], [10, 0.25], [20, 0.5]],
        "attention": {
            "prefill_pair_s": 0.0,
            "prefill_square_s": 0.0,
            "decode_context_s": 0.0,
        },
    }
    return profile | changes


def seconds(shape, layers=1, changes=None, **ends):
    return LatencyProfile.model_validate(fields(**(changes or {}))).stage_seconds(
        shape, layers, **ends
    )


def decodes(count, context=0):
    return BatchShape((), count, count, context)


@pytest.mark.parametrize(
    ("tokens", "expected"), [(1, 1.0), (100, 1.0), (101, 1.5), (200, 2.0), (400, 4.0)]
)
def test_table_keeps_its_steps_and_grows_in_proportion(tokens, expected):
    assert seconds(BatchShape(((tokens, 0),))) == expected


def test_table_interpolates_between_rows():
    changes = {"linear_table": [[1, 1.0], [3, 2.0]]}
    assert seconds(BatchShape(((2, 0),)), changes=changes) == 1.5


def test_empty_micro_batch_takes_no_time():
    assert seconds(BatchShape(), 4, embedding=True, lm_head=True) == 0.0


def test_layers_multiply_what_the_stage_constant_does_not():
    assert seconds(decodes(1), 3, changes={"stage_s": 0.5}) == 3.5


def test_attention_adds_each_chunk_and_the_decodes():
    attention = {
        "prefill_pair_s": 0.001,
        "prefill_square_s": 0.002,
        "prefill_short_s": 0.01,
        "prefill_short_tokens": 4,
        "prefill_token_s": 0.1,
        "prefill_chunk_s": 0.125,
        "decode_context_s": 0.0625,
        "decode_s": 0.25,
        "decode_batch_s": 0.5,
    }
    shape = BatchShape(((8, 10), (2, 0)), decodes=3, decode_tokens=3, decode_context=16)
    chunks = 0.001 * 2 * 80 + 0.002 * (64 + 4) + 0.01 * 10 * 4 + 0.1 * 10 + 2 * 0.125
    expected = 1.0 + chunks + 16 * 0.0625 + 3 * 0.25 + 0.5
    assert seconds(shape, changes={"attention": attention}) == pytest.approx(expected)


def test_ends_of_the_model_cost_tokens_and_sampled_rows():
    shape = BatchShape(((90, 0),), decodes=10, decode_tokens=14, decode_context=0)
    bare = seconds(shape)
    assert seconds(shape, changes={"embedding_token_s": 0.01}, embedding=True) - bare == (
        pytest.approx(1.04)
    )
    assert seconds(shape, lm_head=True) - bare == pytest.approx(0.375)  # 14 + 1 rows


def test_captured_graph_sizes_pad_the_batch():
    changes = {"linear_table": [[1, 1.0], [9, 9.0]], "cudagraph_capture_sizes": [1, 4]}
    assert [seconds(decodes(n), changes=changes) for n in (1, 2, 4, 5)] == [1.0, 4.0, 4.0, 5.0]


def test_negative_layers_are_refused():
    with pytest.raises(ValueError, match="num_layers = -1"):
        seconds(decodes(1), -1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, "hidden_size = 0: .*greater than or equal to 1"),
        ({"linear_table": [[5, 1.0], [5, 2.0]]}, "linear_table.*tokens 5 after 5"),
        ({"linear_table": [[5, -1.0], [6, 2.0]]}, "linear_table.0.1 = -1.0"),
        ({"stage_s": float("nan")}, "stage_s = nan"),
        ({"cudagraph_capture_sizes": [4, 2]}, "cudagraph_capture_sizes.*ascending"),
        ({"colour": "red"}, "colour = 'red'"),
    ],
)
def test_bad_profile_names_file_field_value_and_bound(tmp_path, changes, message):
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(fields(**changes)))
    with pytest.raises(ValueError, match=rf"bad\.yaml: .*{message}"):
        LatencyProfile.load(path)


def test_unknown_profile_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'h100'.*a100_codellama-34b.*h200_qwen2\.5-32b"):
        load_profile("h100")


def test_a_profile_is_found_by_its_name():
    assert load_profile("h200_qwen2.5-32b").name == "h200_qwen2.5-32b"


chunk = st.tuples(st.integers(1, 4096), st.integers(0, 65536))


@pytest.mark.parametrize("profile", PROFILES, ids=lambda p: p.name)
@given(st.lists(chunk, max_size=4), st.integers(1, 512), chunk)
def test_more_work_in_attention_never_takes_less_time(profile, prefills, count, extra):
    shape = BatchShape(tuple(prefills), count, count, 500 * count)
    longer = BatchShape(tuple(prefills), count, count, 501 * count)
    tokens, prefix = extra
    shallow = BatchShape((*prefills, (tokens, prefix)), count, count, 500 * count)
    deep = BatchShape((*prefills, (tokens, prefix + 1)), count, count, 500 * count)
    assert profile.stage_seconds(longer, 8) > profile.stage_seconds(shape, 8)
    assert profile.stage_seconds(deep, 8) > profile.stage_seconds(shallow, 8)


def test_a100_batch_one_token_over_a_tile_costs_a_step_more():
    profile = load_profile("a100_codellama-34b")
    edges = [
        profile.stage_seconds(decodes(tile + 1), 12) / profile.stage_seconds(decodes(tile), 12)
        for tile in (128, 256, 384)
    ]
    inside = profile.stage_seconds(decodes(127), 12) / profile.stage_seconds(decodes(126), 12)
    assert min(edges) > 1.2
    assert inside < 1.02


@pytest.mark.parametrize("profile", PROFILES, ids=lambda p: p.name)
def test_committed_fits_meet_the_aim(profile):
    fit = profile.fit
    assert max(fit.median_percent, fit.heldout_median_percent) <= 3.4
    assert max(fit.mean_percent, fit.heldout_mean_percent) <= 6.0


def test_a_call_takes_under_ten_microseconds():
    profile = load_profile("h200_qwen2.5-32b")
    shape = BatchShape(((256, 512), (100, 0), (300, 0)), 60, 60, 60_000)
    calls = partial(profile.stage_seconds, shape, 16, lm_head=True)
    assert min(timeit.repeat(calls, number=1000, repeat=20)) / 1000 < 10e-6


def test_h200_profile_predicts_the_measured_steps():
    _, shapes = load_rows(data_file("h200_stage", "qwen2.5-32b_16layers_middle.jsonl"))
    profile = load_profile("h200_qwen2.5-32b")
    host = profile.host
    errors = [
        abs(
            profile.stage_seconds(s.shape, 16)
            + host.step_s
            + host.decode_s * s.shape.decodes
            + host.new_request_s * sum(prefix == 0 for _, prefix in s.shape.prefills)
            - s.best_s
        )
        / s.best_s
        for s in shapes
    ]
    assert len(errors) == 567
    assert np.median(errors) < 0.034
    assert np.mean(errors) < 0.06


def test_robust_fit_ignores_an_outlier():
    design = np.array([[1.0, x] for x in range(20)])
    target = design @ np.array([3.0, 0.5])
    target[7] += 100.0
    assert least_absolute(design, target).tolist() == pytest.approx([3.0, 0.5], abs=1e-3)


def made_up_rows(path, decode_s=5e-5):
    """Steps of a stage that takes 1 ms + 10 us a token + 50 us a decode."""
    lines = [
        {
            "meta": {
                "layers": 2,
                "hidden": 64,
                "intermediate": 128,
                "heads": 4,
                "kv_heads": 2,
                "gpu": "none",
                "dtype": "bfloat16",
                "eager": False,
                "vllm": "0.23.0",
            }
        }
    ]
    for tokens in (64, 128, 256, 512):
        for prefix in (0, 1024, 2048):
            pairs = tokens * (2 * prefix + tokens)
            t = 1e-3 + 1e-5 * tokens + 1e-10 * pairs
            row = {"kind": "prefill", "prefill": [[tokens, prefix]], "decodes": 0}
            lines.append(row | {"decode_context": 0, "t_ms": t * 1e3})
    for count in (1, 16, 32, 64, 128, 256, 512):
        for context in (100, 1000):
            t = 1e-3 + (1e-5 + decode_s) * count + 1e-9 * context * count
            row = {"kind": "decode", "prefill": [], "decodes": count}
            lines.append(row | {"decode_context": context * count, "t_ms": t * 1e3})
    path.write_text("\n".join(json.dumps(line) for line in lines))


def test_fit_command_recovers_a_made_up_stage(tmp_path, capsys):
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.yaml"
    made_up_rows(rows)
    words = f"stage --rows {rows} --out {out} --name made-up --model none --num-hidden-layers 4"
    words += " --vocab-size 100 --host-step-ms 0.5 --host-decode-us 50 --host-note none"
    assert main(words.split()) == 0
    profile = load_profile(str(out))
    assert "median 0.0" in capsys.readouterr().out
    assert profile.stage_seconds(decodes(64, 64_000), 2) == pytest.approx(1.204e-3, rel=0.01)
    assert str(tmp_path) not in out.read_text()


def test_bad_measured_row_is_named_by_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"meta": {}}\n{"t_ms": 1}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: "):
        load_rows(path)


def test_fit_command_ends_with_a_message_on_bad_rows(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text("nonsense")
    words = f"stage --rows {path} --out o --name n --model m --num-hidden-layers 4"
    words += " --vocab-size 100 --host-step-ms 0.5 --host-decode-us 50 --host-note none"
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    assert "rows.jsonl:1: " in capsys.readouterr().err


def test_tile_step_is_one_token_after_the_multiple():
    assert step_table({120: 1.0, 128: 1.1, 136: 2.0, 144: 2.1}) == [
        (120, 1.0),
        (128, 1.1),
        (129, 2.0),
        (136, 2.0),
        (144, 2.1),
    ]


def test_host_work_is_what_a_full_pipeline_saves():
    # A stage of 10 ms + 1 ms a decode, of which 2 ms + 0.5 ms a decode are the host's.
    pairs = [(float(n), 0.008 + 0.0005 * n) for n in (4, 20, 40) for _ in range(10)]
    found = host_seconds({1000.0: pairs}, lambda n, context: 0.01 + 0.001 * n)
    assert found == pytest.approx((0.002, 0.0005))


def test_a_decode_is_alive_once_for_each_token_it_outputs():
    assert mean_decode_context([(100, 20), (1000, 0), (10, 40)]) == pytest.approx(
        (110 * 20 + 30 * 40) / 60
    )


def test_gaps_come_from_decode_only_steps():
    gaps = list(decode_gaps(data_file("h200x2_pp2", "steps_r15_b1024.jsonl.gz")))
    near_100 = [gap for count, gap in gaps if 96 <= count < 104]
    assert 0.0135 < np.median(near_100) < 0.0155
