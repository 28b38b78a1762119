"""Settings: sources, precedence, and errors that name knob, value, bound and source."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ppbalance.__main__ import main, markdown_table
from vllm_ppbalance.config import Settings, all_knobs
from vllm_ppbalance.sources import SettingsError, load_settings

README = Path(__file__).parent.parent / "README.md"
CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))


def test_defaults_are_the_published_ones():
    settings = load_settings(None, {}).settings
    assert (settings.slo_ttft, settings.slo_tpot) == (2.0, 0.2)
    chunk = settings.chunk
    assert (chunk.greedy_min_chunk, chunk.greedy_base_chunk, chunk.greedy_max_chunk) == (
        128,
        128,
        2048,
    )
    ratios = (chunk.tpot_violation_ratio, chunk.ttft_low_ratio, chunk.ttft_high_ratio)
    assert (*ratios, chunk.tpot_safe_ratio, chunk.kv_free_threshold) == (1.08, 0.1, 0.3, 0.85, 0.1)
    assert settings.rebalance.delay_threshold == 4
    predictor = settings.predictor
    assert (predictor.forgetting, predictor.initial_variance) == (0.9975, 1.25)
    assert predictor.error_clip == 0.4


def test_the_first_source_wins_knob_by_knob(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("slo_ttft: 9\nslo_tpot: 0.9\nchunk:\n  strategy: fixed\n  fixed_tokens: 77\n")
    environ = {
        "PPBALANCE": "1",
        "PPBALANCE_CONFIG": str(file),
        "PPBALANCE_SLO_TPOT": "0.5",
        "PPBALANCE_CHUNK__STRATEGY": "greedy",
    }
    loaded = load_settings({"ppbalance": {"chunk": {"strategy": "fixed"}}}, environ)
    assert loaded.settings.slo_ttft == 9
    assert loaded.settings.slo_tpot == 0.5
    assert loaded.settings.chunk.strategy == "fixed"
    assert loaded.settings.chunk.fixed_tokens == 77
    assert loaded.source_of("slo_ttft") == str(file)
    assert loaded.source_of("slo_tpot") == "PPBALANCE_SLO_TPOT"
    assert loaded.source_of("chunk.strategy") == "--additional-config"
    assert loaded.source_of("rebalance.strategy") == "default"


def test_other_plugins_settings_are_not_ours():
    loaded = load_settings({"ascend": {"graph": True}}, {"PATH": "/bin", "VLLM_X": "1"})
    assert loaded.settings == Settings()


@pytest.mark.parametrize(
    ("additional", "environ", "words"),
    [
        ({"slo_ttft": -1}, {}, ["slo_ttft", "-1", "greater than 0", "--additional-config"]),
        ({"slo_ttft": True}, {}, ["slo_ttft", "True", "number"]),
        ({"slow": 1}, {}, ["slow", "no such setting", "slo_ttft"]),
        ({"chunk": {"stratgy": "fixed"}}, {}, ["chunk.stratgy", "no such setting", "strategy"]),
        ({"chunk": 5}, {}, ["chunk", "5", "--additional-config"]),
        ({"slo_tpot": {}}, {}, ["slo_tpot", "{}"]),
        ({}, {"PPBALANCE_CHUNK__STRATEGY": "magic"}, ["chunk.strategy", "magic", "greedy"]),
        ({}, {"PPBALANCE_SLO_TPOT": "nan"}, ["slo_tpot", "nan", "PPBALANCE_SLO_TPOT"]),
        ({}, {"PPBALANCE_SLO_TPOT": "1e400"}, ["slo_tpot", "inf", "PPBALANCE_SLO_TPOT"]),
        ({}, {"PPBALANCE_CHUNK__GREEDY_MIN_CHUNK": "0"}, ["greedy_min_chunk", "0", "1"]),
        ({}, {"PPBALANCE_CHUNK__GREEDY_MIN_CHUNK": "9000"}, ["greedy_min_chunk = 9000", "2048"]),
        ({"predictor": {"forgetting": 0.5}}, {}, ["predictor.forgetting", "0.5", "0.9"]),
        ({"predictor": {"initial_variance": 0}}, {}, ["predictor.initial_variance", "0"]),
        ({}, {"PPBALANCE_PREDICTOR__ERROR_CLIP": "1.5"}, ["predictor.error_clip", "1.5", "1"]),
        ({}, {"PPBALANCE_CONFIG": "/nowhere/x.yaml"}, ["PPBALANCE_CONFIG", "/nowhere/x.yaml"]),
        ({}, {"PPBALANCE_CHUNK": "3", "PPBALANCE_CHUNK__STRATEGY": "fixed"}, ["chunk"]),
        (
            {},
            {"PPBALANCE_REBALANCE__BASE_UNIT": "0"},
            ["rebalance.base_unit = 0 (from PPBALANCE_REBALANCE__BASE_UNIT): ", "'auto'", "to 1"],
        ),
        (
            {},
            {"PPBALANCE_CHUNK__GREEDY_MIN_CHUNK": "4096"},
            ["greedy_max_chunk = 2048", "from PPBALANCE_CHUNK__GREEDY_MIN_CHUNK"],
        ),
        (
            {},
            {"PPBALANCE_CHUNK__CHUNK_CANDIDATES": "[512, 256]"},
            ["chunk_candidates = (512, 256)", "from PPBALANCE_CHUNK__CHUNK_CANDIDATES"],
        ),
        ({}, {"PPBALANCE_CHUNK__CHUNK_CANDIDATES": "128,256"}, ["a list such as [128, 256]"]),
        ({}, {"PPBALANCE_METRICS": "off"}, ["metrics = 'off'", "true or false"]),
        ({}, {"PPBALANCE_CHUNK": "greedy"}, ["chunk = 'greedy'", "object", "strategy"]),
        ({"rebalance": {"strategy": False}}, {}, ["rebalance.strategy = False", 'write "off"']),
        ({}, {"PPBALANCE_CHUNK_STRATEGY": "fixed"}, ["did you mean", "PPBALANCE_CHUNK__STRATEGY"]),
        ({}, {"PPBALANCE": "maybe"}, ["PPBALANCE = 'maybe' must be 1 or 0"]),
        ({}, {"PPBALANCE_STRICT": "2"}, ["PPBALANCE_STRICT = '2' must be 1 or 0"]),
    ],
)
def test_a_wrong_setting_is_named_with_its_value_and_bound(additional, environ, words):
    with pytest.raises(SettingsError) as caught:
        load_settings({"ppbalance": additional}, environ)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "constrained" not in str(caught.value)  # pydantic's own names


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "\t", "x"])
def test_a_file_that_is_no_mapping_is_refused_by_name(tmp_path, text):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=re.escape(str(file))) as caught:
        load_settings(None, {"PPBALANCE_CONFIG": str(file)})
    assert "\n" not in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
NAMES = st.sampled_from(["slo_ttft", "slo_tpot", "chunk", "rebalance", "strategy", "other"])


@given(st.dictionaries(NAMES, st.dictionaries(NAMES, JSON, max_size=3) | JSON, max_size=4))
def test_any_json_either_loads_or_is_a_settings_error(tree):
    try:
        loaded = load_settings({"ppbalance": tree}, {})
    except SettingsError:
        return
    assert loaded.settings.slo_ttft > 0


def test_every_knob_says_what_it_means_and_its_unit():
    for name, field in all_knobs():
        assert field.description, name
        assert "unit" in field.json_schema_extra, name


def test_the_readme_holds_the_table_of_all_settings():
    assert markdown_table() in README.read_text(encoding="utf-8")


def test_ready_files_load():
    assert {file.stem for file in CONFIGS} >= {"fixed", "greedy", "decode_balance", "long_context"}
    for file in CONFIGS:
        load_settings(None, {"PPBALANCE_CONFIG": str(file)})


def test_config_prints_values_with_their_sources(capsys, monkeypatch):
    monkeypatch.setenv("PPBALANCE_SLO_TTFT", "3.5")
    assert main(["config"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(list(all_knobs()))
    assert lines[0].split() == ["slo_ttft", "3.5", "PPBALANCE_SLO_TTFT"]


def test_config_says_what_is_wrong_and_fails(capsys):
    assert main(["config", "--additional-config", '{"ppbalance": {"slo_ttft": 0}}']) == 1
    assert "slo_ttft = 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("[1]", "--additional-config = '[1]' must be an object"),
        ("{", "--additional-config = '{' is no JSON"),
    ],
)
def test_config_names_the_option_that_is_wrong(given, words, capsys):
    assert main(["config", "--additional-config", given]) == 1
    assert words in capsys.readouterr().err


def test_settings_beside_our_entry_are_not_lost_in_silence(capsys):
    assert main(["config", "--additional-config", '{"chunk": {"strategy": "fixed"}}']) == 0
    assert "no entry ppbalance" in capsys.readouterr().err


def test_what_another_strategy_would_read_is_told(capsys, monkeypatch):
    monkeypatch.setenv("PPBALANCE_CHUNK__FIXED_TOKENS", "512")
    monkeypatch.setenv("PPBALANCE_CHUNK__FALLBACK_TOKENS", "512")
    monkeypatch.setenv("PPBALANCE_ADMISSION__STRATEGY", "fcfs")
    monkeypatch.setenv("PPBALANCE_PROFILING__MODE", "off")
    assert main(["config"]) == 0
    [line] = capsys.readouterr().err.splitlines()
    for word in ("chunk.fixed_tokens", "PPBALANCE_CHUNK__FIXED_TOKENS", "strategy = balanced"):
        assert word in line


def test_a_profile_of_no_model_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["profile", "-pp", "4"])
    assert "--model NAME" in capsys.readouterr().err


def test_what_kubernetes_says_of_a_service_of_our_name_is_no_setting():
    service = {
        "PPBALANCE_PORT": "tcp://10.96.12.3:8000",
        "PPBALANCE_PORT_8000_TCP": "tcp://10.96.12.3:8000",
        "PPBALANCE_PORT_8000_TCP_ADDR": "10.96.12.3",
        "PPBALANCE_SERVICE_HOST": "10.96.12.3",
        "PPBALANCE_SERVICE_PORT": "8000",
        "PPBALANCE_SERVICE_PORT_HTTP": "8000",
    }
    assert load_settings(None, service).settings == Settings()
    with pytest.raises(SettingsError, match=r"port = 9400 .*no such setting"):
        load_settings(None, {"PPBALANCE_PORT": "9400"})
