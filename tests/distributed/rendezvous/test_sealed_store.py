"""What strangers can read and write in the store, and what follows from it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch.distributed as dist

import torchopt_dist as todist
from tests.processes import World
from torchopt_dist.distributed.rendezvous.sealed_store import SealedStore, open_store

SECRET = b"0123456789abcdef"


@pytest.fixture
def store():
    return dist.HashStore()


@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_note_is_read_as_it_was_written(store, secret):
    mine, other = (SealedStore(store, "run", secret) for _ in range(2))
    mine.tell("where/0", "a: b")
    mine.tell("where/1", "")
    assert other.told("where/0", "where/1") == ["a: b", ""]
    assert mine.make_token("hub") == other.token("hub") != mine.make_token("another")


FORGERIES = {
    "no seal": lambda notes: ":evil",
    "no colon": lambda notes: "evil",
    "another secret": lambda notes: f"{SealedStore(notes, 'run', b'f' * 16)._seal('where', 'evil')}:evil",
    "another key's note": lambda notes: notes.get("elsewhere").decode(),
    "another run's note": lambda notes: f"{SealedStore(notes, 'last', SECRET)._seal('where', 'old')}:old",
    "a changed note": lambda notes: notes.get("where").decode().replace("mine", "evil"),
}


@pytest.mark.parametrize("forge", FORGERIES.values(), ids=FORGERIES.keys())
def test_a_note_that_a_stranger_has_written_is_refused_by_name(store, forge):
    notes = SealedStore(store, "run", SECRET)
    notes.tell("where", "mine")
    notes.tell("elsewhere", "mine, too")
    store.set("where", forge(store))
    with pytest.raises(
        todist.errors.InitializationError, match=r"'where' .* another process .* TODIST_SECRET"
    ):
        notes.told("where")


def test_a_worker_without_the_others_secret_is_told(store):
    SealedStore(store, "run", SECRET).tell("where", "here")
    with pytest.raises(todist.errors.InitializationError, match=r"this worker has no secret.* on all nodes"):
        SealedStore(store, "run").told("where")


def test_a_short_secret_is_refused_before_anybody_is_met(monkeypatch):
    monkeypatch.setenv("TODIST_SECRET", "short")
    with pytest.raises(
        todist.errors.InitializationError, match=r"TODIST_SECRET must have at least 16.* got 5"
    ):
        todist.auto_init_rpc()(lambda: None)()


def test_workers_of_one_machine_need_no_secret_to_be_given(store, monkeypatch):
    monkeypatch.delenv("TODIST_SECRET", raising=False)
    with open_store(store, "run", 0, True) as first:
        path = Path(store.get("secret").decode())
        assert path.parent.stat().st_mode & 0o077 == 0
        with open_store(store, "run", 1, True) as second:
            first.tell("where", "here")
            assert second.told("where") == ["here"]
    assert not path.parent.exists()
    store.set("where", ":there")
    with pytest.raises(todist.errors.InitializationError, match="another process"):
        second.told("where")


def test_a_file_that_somebody_else_may_have_written_is_no_secret(store, monkeypatch, tmp_path):
    monkeypatch.delenv("TODIST_SECRET", raising=False)
    (tmp_path / "todist-evil").mkdir(mode=0o755)
    (tmp_path / "known").mkdir(mode=0o700)
    for path in ("todist-evil/secret", "known/secret", "todist-gone/secret"):
        if "gone" not in path:
            (tmp_path / path).write_bytes(SECRET)
        store.set("secret", str(tmp_path / path))
        with (
            pytest.raises(
                todist.errors.InitializationError, match=f"{path}.* cannot be read.* set TODIST_SECRET"
            ),
            open_store(store, "run", 1, True),
        ):
            pass


def test_workers_of_several_machines_without_a_secret_have_none(store, monkeypatch):
    monkeypatch.delenv("TODIST_SECRET", raising=False)
    with open_store(store, "run", 0, False) as notes:
        notes.tell("where", "here")
    assert store.get("where") == b":here"


def joins(secrets):
    """``main`` of a worker that was told this secret."""
    os.environ["TODIST_SECRET"] = secrets[int(os.environ["RANK"])]
    try:
        return todist.auto_init_rpc()(os.getpid)()
    except (todist.TodistError, OSError) as error:
        return str(error)


@pytest.mark.processes
def test_who_has_the_store_but_not_the_secret_joins_no_group():
    secrets = ("the secret of the run", "a secret of a stranger")
    ends = World(2, env={"TODIST_TRANSPORT": "zmq", "TODIST_INIT_TIMEOUT": "1"}, rpc=False).run(
        joins, secrets
    )
    assert "all workers to join" in ends[0]
    assert "'membership' in the store is not signed with this run's secret" in ends[1]
