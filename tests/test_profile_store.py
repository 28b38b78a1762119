"""Saved profiles: round trip, reasons for refusal, atomic writes, one save a minute."""

import json
import os
import threading

import pytest

from vllm_ppbalance.base_table import BaseTable
from vllm_ppbalance.cost_model import CostModel
from vllm_ppbalance.profile_store import (
    ProfileRefusedError,
    ProfileStore,
    Saver,
    default_directory,
)

HERE = {"model": "org/name", "gpu": "H200", "pipeline_parallel_size": 4}
YEAR_S = 365 * 86_400.0


def model():
    return CostModel(BaseTable([64, 512, 2048], [0.01, 0.02, 0.06]), profiled=True)


def test_what_is_saved_comes_back(tmp_path):
    store = ProfileStore(tmp_path / "new" / "folder", HERE)
    store.save(model().to_dict())
    assert store.load(YEAR_S).to_dict() == model().to_dict()
    assert [file.name for file in store.path.parent.iterdir()] == [store.path.name]


def test_a_user_without_a_home_still_has_a_place_for_profiles(monkeypatch):
    """A container's user id may have no name, and so no home."""

    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert default_directory({}).name == "vllm_ppbalance"


def test_deployments_have_files_of_their_own(tmp_path):
    other = ProfileStore(tmp_path, {**HERE, "gpu": "A100"})
    assert other.path != ProfileStore(tmp_path, HERE).path
    with pytest.raises(ProfileRefusedError, match="none yet"):
        other.load(YEAR_S)


def test_a_foreign_file_is_refused_by_what_differs(tmp_path):
    store, other = ProfileStore(tmp_path, HERE), ProfileStore(tmp_path, {**HERE, "gpu": "A100"})
    other.save(model().to_dict())
    os.replace(other.path, store.path)
    with pytest.raises(ProfileRefusedError, match="gpu is 'A100', here it is 'H200'"):
        store.load(YEAR_S)


def test_a_stale_file_is_refused_with_its_age(tmp_path):
    store = ProfileStore(tmp_path, HERE)
    store.save(model().to_dict(), now_s=0.0)
    with pytest.raises(ProfileRefusedError, match="40 days old"):
        store.load(30 * 86_400.0, now_s=40 * 86_400.0)


@pytest.mark.parametrize("cut", [0, 1, 40, -2])
def test_a_truncated_file_is_refused(tmp_path, cut):
    store = ProfileStore(tmp_path, HERE)
    store.save(model().to_dict())
    text = store.path.read_text()
    store.path.write_text(text[:cut])
    with pytest.raises(ProfileRefusedError):
        store.load(YEAR_S)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format", 99),
        ("deployment", None),
        ("saved_at", "today"),
        ("saved_at", 10**400),
        ("saved_at", float("nan")),
        ("model", {}),
        ("model", {"version": 1, "tokens": [1]}),
        ("model", None),
    ],
)
def test_a_file_of_another_shape_is_refused(tmp_path, field, value):
    store = ProfileStore(tmp_path, HERE)
    store.save(model().to_dict())
    saved = json.loads(store.path.read_text())
    store.path.write_text(json.dumps({**saved, field: value}))
    with pytest.raises(ProfileRefusedError):
        store.load(YEAR_S)


def test_times_too_small_to_reckon_with_are_refused(tmp_path):
    store = ProfileStore(tmp_path, HERE)
    store.save({**model().to_dict(), "seconds": [1e-320] * 3})
    with pytest.raises(ProfileRefusedError, match="not a saved cost model"):
        store.load(YEAR_S)


@pytest.mark.parametrize("raw", [b"", b"\0" * 400, b"\xff\xfe garbage", b"[" * 200_000, b"{}"])
def test_garbage_is_refused(tmp_path, raw):
    store = ProfileStore(tmp_path, HERE)
    store.path.write_bytes(raw)
    with pytest.raises(ProfileRefusedError, match=r"cannot be read|format"):
        store.load(YEAR_S)


def test_two_servers_writing_at_once_leave_a_whole_file(tmp_path):
    stores = [ProfileStore(tmp_path, HERE) for _ in range(2)]

    def write(store):
        for _ in range(50):
            store.save(model().to_dict())

    threads = [threading.Thread(target=write, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if stores[0].path.exists():
            stores[0].load(YEAR_S)
    for thread in threads:
        thread.join(timeout=30)
    assert stores[0].load(YEAR_S).trusted
    assert len(list(tmp_path.iterdir())) == 1


def learn(own):
    assert own.observe(512, ((512, 0),), 0, 0, 0.02)


def test_learnt_state_is_saved_every_ten_seconds_and_at_the_end(tmp_path):
    store, own = ProfileStore(tmp_path, HERE), model()
    saver = Saver(store, own)
    saver.tick(0.0)
    learn(own)
    saver.tick(9.0)
    saver.tick(9.9)
    assert saver._thread is None
    saver.tick(10.0)
    saver._thread.join(timeout=10)
    assert store.load(YEAR_S).num_samples == 1
    learn(own)
    saver.tick(11.0)
    saver.close()
    assert store.load(YEAR_S).num_samples == 2


def test_the_first_model_to_trust_is_saved_at_once(tmp_path):
    """Nothing was measured at start, and vLLM's server may kill the engine before it can close."""
    store = ProfileStore(tmp_path, HERE)
    own = CostModel(BaseTable([64, 512, 2048], [0.01, 0.02, 0.06]))
    saver = Saver(store, own)
    saves = 0
    for now_s in range(50):
        learn(own)
        trusted = own.trusted
        saver.tick(0.1 * now_s)
        assert (saver._thread is not None) == trusted
        if saver._thread is not None:
            saver._thread.join(timeout=10)
            saves = saves or own.num_samples
    assert 1 < saves < 50
    assert store.load(YEAR_S).num_samples == saves


def test_nothing_learnt_is_nothing_written(tmp_path):
    store = ProfileStore(tmp_path, HERE)
    saver = Saver(store, model())
    saver.tick(0.0)
    saver.tick(1000.0)
    saver.close()
    assert not store.path.exists()


def test_a_place_that_cannot_be_written_is_reported_not_raised(tmp_path):
    (tmp_path / "file").write_text("")
    own = model()
    saver = Saver(ProfileStore(tmp_path / "file", HERE), own)
    learn(own)
    saver.close()
    assert saver.error
