"""Activation, versions and seams; vLLM is real, nothing is started."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("vllm")

import vllm
from vllm.engine.arg_utils import EngineArgs

from bench.vllm_harness import build_scheduler
from tests.worlds import ASYNC, SYNC, batch_of, serve, settings
from vllm_ppbalance import compatibility, plugin
from vllm_ppbalance.sources import SettingsError

pytestmark = pytest.mark.scheduler


@pytest.fixture(autouse=True)
def _no_settings_of_the_caller(monkeypatch):
    for name in [name for name in os.environ if name.startswith("PPBALANCE")]:
        monkeypatch.delenv(name)


@pytest.fixture
def warnings_of_ours(caplog, monkeypatch):
    """Messages of our logger; vLLM's root does not propagate."""
    monkeypatch.setattr("vllm_ppbalance.plugin.logger.propagate", True)
    caplog.set_level("INFO", "vllm.ppbalance")

    def messages(level):
        ours = (record for record in caplog.records if record.name == "vllm.ppbalance")
        return [record.getMessage() for record in ours if record.levelname == level]

    return messages


@pytest.fixture
def registered(monkeypatch):
    """The plugin registered for this test only."""
    monkeypatch.setattr(EngineArgs, "create_engine_config", EngineArgs.create_engine_config)
    plugin.register()


@pytest.mark.parametrize(
    ("version", "good"),
    [
        ("0.22.1", False),
        ("0.23.0", True),
        ("0.32.0", True),
        ("0.33.9", True),
        ("0.34.0", False),
        ("1.0.0", False),
        ("0.33.1rc1.dev3+gabc", True),
        ("dev", False),
    ],
)
def test_supported_versions(version, good):
    assert compatibility.supported(version) is good


def test_the_installed_vllm_has_every_seam():
    assert [name for name, present in compatibility.check_seams() if not present] == []
    assert compatibility.incompatibility() is None


def test_a_vllm_outside_the_range_gets_one_warning_and_stock(monkeypatch, warnings_of_ours):
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    stock = serve(batch_of(4), stock=True, pp_size=2, **SYNC)
    ours = serve(batch_of(4), pp_size=2, **SYNC)
    assert type(ours.scheduler) is type(stock.scheduler)
    assert ours.rows == stock.rows
    warnings = warnings_of_ours("WARNING")
    assert len(warnings) == 1
    assert "0.99.0" in warnings[0]
    assert "0.23 to 0.33" in warnings[0]


def test_a_missing_seam_is_named_and_stock_goes_on(monkeypatch, warnings_of_ours):
    seams = (*compatibility.SEAMS, ("vllm.v1.core.sched.scheduler", "Scheduler.gone", "x"))
    monkeypatch.setattr(compatibility, "SEAMS", seams)
    compatibility.check_seams.cache_clear()
    ours = serve(batch_of(2), pp_size=2, **SYNC)
    compatibility.check_seams.cache_clear()
    assert not hasattr(ours.scheduler, "ppbalance")
    assert "Scheduler.gone" in warnings_of_ours("WARNING")[0]


def test_strict_makes_it_an_error(monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    monkeypatch.setenv("PPBALANCE_STRICT", "1")
    with pytest.raises(plugin.Incompatible, match=r"0\.99\.0"):
        serve(batch_of(2), pp_size=2, **SYNC)


def test_under_torchrun_the_schedulers_of_all_ranks_decide_alike(warnings_of_ours):
    """Each rank has one; ours would go by times that differ, and the stages wait for each other."""
    ours = build_scheduler(plugin.Scheduler, pp_size=2, additional_config=settings())
    ours.vllm_config.parallel_config.distributed_executor_backend = "external_launcher"
    scheduler = plugin.Scheduler(
        ours.vllm_config,
        kv_cache_config=ours.kv_cache_config,
        structured_output_manager=ours.structured_output_manager,
        block_size=ours.block_size,
    )
    assert hasattr(ours, "ppbalance")
    assert not hasattr(scheduler, "ppbalance")
    assert "external_launcher" in warnings_of_ours("WARNING")[0]


def test_the_start_is_logged_in_one_line(monkeypatch, warnings_of_ours):
    monkeypatch.setenv("PPBALANCE_SLO_TTFT", "3")
    serve(batch_of(1), pp_size=2, **SYNC)
    active = [line for line in warnings_of_ours("INFO") if "ppbalance is active" in line]
    assert len(active) == 1
    assert "2 stages" in active[0]
    assert "PPBALANCE_SLO_TTFT" in active[0]


def test_registering_twice_wraps_once(registered):
    wrapped = EngineArgs.create_engine_config
    plugin.register()
    assert EngineArgs.create_engine_config is wrapped


@pytest.fixture
def engine_args(tmp_path):
    """Arguments of an engine over a config.json, as `vllm serve` makes them."""
    from vllm.platforms import current_platform

    from bench.vllm_harness import model_dir

    if not current_platform.device_type:
        pytest.skip("vLLM's sources without kernels know no device to make an engine config for")

    def make(**fields):
        fields = {"model": model_dir(False).name, "skip_tokenizer_init": True, **fields}
        return EngineArgs(max_model_len=512, pipeline_parallel_size=2, **fields)

    return make


def scheduler_cls(args, **kwargs):
    return args.create_engine_config(**kwargs).scheduler_config.scheduler_cls


def test_without_the_flag_nothing_changes(registered, engine_args):
    assert scheduler_cls(engine_args()) is None


def test_the_flag_names_our_scheduler(registered, engine_args, monkeypatch):
    monkeypatch.setenv("PPBALANCE", "1")
    assert scheduler_cls(engine_args()) == "vllm_ppbalance.Scheduler"


def test_the_users_scheduler_wins(registered, engine_args, monkeypatch):
    monkeypatch.setenv("PPBALANCE", "1")
    args = engine_args(scheduler_cls="vllm.v1.core.sched.scheduler.Scheduler")
    assert scheduler_cls(args) == "vllm.v1.core.sched.scheduler.Scheduler"


def test_a_flag_that_is_neither_on_nor_off_is_an_error(registered, engine_args, monkeypatch):
    monkeypatch.setenv("PPBALANCE", "perhaps")
    with pytest.raises(SettingsError, match="PPBALANCE = 'perhaps' must be 1 or 0"):
        scheduler_cls(engine_args())


def test_a_bad_setting_ends_the_server_with_one_line(registered, engine_args):
    from vllm.usage.usage_lib import UsageContext

    args = engine_args(
        scheduler_cls="vllm_ppbalance.Scheduler",
        additional_config={"ppbalance": {"slo_tpot": 0}},
    )
    with pytest.raises(SettingsError, match=r"slo_tpot = 0 .*greater than 0"):
        scheduler_cls(args)
    with pytest.raises(SystemExit, match=r"^ppbalance: wrong setting: slo_tpot = 0 "):
        scheduler_cls(args, usage_context=UsageContext.OPENAI_API_SERVER)


@pytest.mark.parametrize("part", ["_additional_config", "enabled", "load_settings"])
def test_a_config_that_cannot_be_read_does_not_stop_vllm(
    registered, engine_args, monkeypatch, warnings_of_ours, part
):
    def raising(*_):
        raise AttributeError("planted")

    monkeypatch.setenv("PPBALANCE", "1")
    monkeypatch.setattr(plugin, part, raising)
    assert engine_args().create_engine_config().parallel_config.pipeline_parallel_size == 2
    assert len(warnings_of_ours("ERROR")) == 1
    monkeypatch.setenv("PPBALANCE_STRICT", "1")
    with pytest.raises(AttributeError, match="planted"):
        engine_args().create_engine_config()


def test_a_vllm_without_the_way_in_starts_all_the_same(monkeypatch, warnings_of_ours):
    """vLLM calls its plugins unguarded: what we raise would end every process of it."""
    monkeypatch.delattr(EngineArgs, "create_engine_config")
    plugin.register()
    assert "create_engine_config" in warnings_of_ours("WARNING")[0]
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", None)
    plugin.register()
    assert len(warnings_of_ours("WARNING")) == 2


def test_importing_the_package_imports_neither_vllm_nor_torch():
    code = "import sys, vllm_ppbalance; assert not {'vllm', 'torch'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("mode", [SYNC, ASYNC], ids=["sync", "async-v2"])
def test_one_stage_is_vllms_own_unless_it_is_to_be_measured(mode, tmp_path):
    own = {"profiling": {"directory": str(tmp_path)}}
    requests = batch_of(40, prompt=300, max_tokens=30)
    stock = serve(requests, stock=True, pp_size=1, **mode)
    named = serve(requests, pp_size=1, additional_config={"ppbalance": own}, **mode)
    assert type(named.scheduler) is type(stock.scheduler)
    assert named.rows == stock.rows
    config = {"additional_config": {"ppbalance": own}, "ours": plugin.StageScheduler}
    serve([], pp_size=1, **config, **mode)
    measured = serve(requests, pp_size=1, **config, **mode)
    assert not measured.scheduler.ppbalance_failed
    assert measured.scheduler.ppbalance.cost_model.num_samples > 0
    assert measured.tokens == stock.tokens
