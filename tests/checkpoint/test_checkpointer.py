"""Checkpoints in a folder: when they are written, whole or not at all, and what is taken when one is corrupt."""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle
import resource
import threading

import pytest
import torch

import torchopt_dist as todist
from torchopt_dist.checkpoint import _files

WAIT = 60.0


def net(value=1.0, size=2):
    module = torch.nn.utils.skip_init(torch.nn.Linear, size, 1, bias=False)  # draws no numbers
    torch.nn.init.constant_(module.weight, value)
    return module


def steps(folder):
    return [file.step for file in _files.find(folder)]


def value(folder, **options):
    """The step and the value of the newest checkpoint of a `net()`."""
    module = net(0.0)
    step, _ = todist.Checkpointer(folder, **options).restore({"net": module})
    return step, module.weight[0, 0].item()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "new" / "checkpoints"


def save_two(folder):
    checkpointer = todist.Checkpointer(folder)
    for step in (1, 2):
        checkpointer.save(step, {"net": net(step)})
    return [file.path for file in _files.find(folder)]


def test_without_a_checkpoint_all_is_as_given(folder):
    module, tensor = net(3.0), torch.ones(2)
    step, objects = todist.Checkpointer(folder).restore({"net": module, "tensor": tensor, "count": 5})
    assert step == 0
    assert objects == {"net": module, "tensor": tensor, "count": 5}
    assert module.weight.tolist() == [[3.0, 3.0]]
    assert not folder.exists()


def test_every_and_force(folder):
    checkpointer = todist.Checkpointer(folder, every=3, keep=None)
    written = [step for step in range(1, 11) if checkpointer.save(step, {"step": step})]
    assert written == [3, 6, 9]
    assert checkpointer.save(10, {"step": 10}, force=True)
    assert steps(folder) == [10, 9, 6, 3]
    assert checkpointer.restore({"step": 0}) == (10, {"step": 10})


def test_keep_prunes_the_oldest(folder):
    checkpointer = todist.Checkpointer(folder, keep=2)
    for step in range(5):
        checkpointer.save(step, {"net": net(step)})
        assert steps(folder) == list(range(step, max(step - 2, -1), -1))
    assert len(list(folder.iterdir())) == 2


def test_files_of_others_stay(folder):
    folder.mkdir(parents=True)
    others = [folder / name for name in ("step-1.pt", "notes", f"step-000000001-{16 * 'g'}.pt", "model.tmp")]
    for path in others:
        path.write_text("mine")
    (folder / f"step-000000009-{16 * '0'}.pt").mkdir()
    checkpointer = todist.Checkpointer(folder, keep=1)
    for step in (1, 2):
        checkpointer.save(step, {"net": net(step)})
    assert all(path.read_text() == "mine" for path in others)
    assert value(folder) == (2, 2.0)


def test_a_step_that_is_saved_again_is_replaced(folder):
    checkpointer = todist.Checkpointer(folder)
    for number in (1.0, 2.0, 2.0):
        checkpointer.save(5, {"net": net(number)})
        assert steps(folder) == [5]
        assert value(folder) == (5, number)


def test_a_lower_step_is_refused_as_restore_would_not_see_it(folder):
    save_two(folder)
    with pytest.raises(ValueError, match=r"`step` must be at least 2, that of .*step-000000002-.*got 1"):
        todist.Checkpointer(folder).save(1, {"net": net()})
    assert steps(folder) == [2, 1]


def test_only_rank_zero_writes_and_all_restore(folder, monkeypatch):
    todist.Checkpointer(folder).save(1, {"net": net(4.0)})
    random_state = torch.get_rng_state()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert todist.Checkpointer(folder).save(2, {"net": net()}) is False
    torch.rand(1)
    mine = torch.get_rng_state()
    assert value(folder) == (1, 4.0)
    assert torch.equal(torch.get_rng_state(), mine), "a rank's own generator is not rank 0's"
    assert steps(folder) == [1]
    monkeypatch.setenv("RANK", "0")
    value(folder, random_states=False)
    assert torch.equal(torch.get_rng_state(), mine)
    value(folder)
    assert torch.equal(torch.get_rng_state(), random_state)


def test_a_file_is_the_user_s_alone_and_torch_loads_it(folder):
    before = os.umask(0)
    try:
        todist.Checkpointer(folder).save(3, {"net": net(2.0)})
    finally:
        os.umask(before)
    (path,) = folder.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.name == f"step-000000003-{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}.pt"
    contents = torch.load(path, weights_only=True)
    assert contents["step"] == 3
    kind, state = contents["objects"]["net"][""]
    assert kind == "state_dict"
    assert state["weight"].tolist() == [[2.0, 2.0]]


class Crash(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize("call", [0, 1, 2])
def test_a_crash_leaves_the_old_or_the_new_and_the_disk_has_it_before_its_name(folder, monkeypatch, call):
    """The calls are fsync of the file, rename, fsync of the folder; the last comes when the file is complete."""
    todist.Checkpointer(folder).save(1, {"net": net(1.0)})
    calls = []

    def spy(name):
        original = getattr(os, name)

        def spied(*args):
            calls.append(
                (name, os.path.isdir(args[0]) if name == "rename" else os.fstat(args[0]).st_mode >> 12)
            )
            if len(calls) == call + 1:
                raise Crash
            return original(*args)

        monkeypatch.setattr(os, name, spied)

    spy("fsync")
    spy("rename")
    monkeypatch.setattr(os, "unlink", lambda path: pytest.fail(f"{path} unlinked by a dead process"))
    with pytest.raises((Crash, pytest.fail.Exception)):
        todist.Checkpointer(folder, keep=1).save(2, {"net": net(2.0)})
    assert calls == [("fsync", 8), ("rename", False), ("fsync", 4)][: call + 1]
    monkeypatch.undo()
    assert value(folder) == ((2, 2.0) if call == 2 else (1, 1.0))
    todist.Checkpointer(folder, keep=1).save(3, {"net": net(3.0)})
    assert value(folder) == (3, 3.0)
    assert len(list(folder.iterdir())) == 1, "the abandoned file is still there"


def test_a_file_that_another_process_writes_is_left_alone(folder):
    folder.mkdir(parents=True)
    temporary = folder / ".step-abc.tmp"
    with temporary.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        todist.Checkpointer(folder).save(1, {"net": net()})
        assert temporary.exists()
    todist.Checkpointer(folder).save(2, {"net": net()})
    assert not temporary.exists()


def truncated(path, size):
    os.truncate(path, size(path.stat().st_size))


def flipped(path, place):
    data = bytearray(path.read_bytes())
    data[place(len(data))] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "where"),
    [
        (truncated, lambda size: 0),
        (truncated, lambda size: size // 2),
        (truncated, lambda size: size - 1),
        (truncated, lambda size: size + 1),
        (flipped, lambda size: 0),
        (flipped, lambda size: size // 3),
        (flipped, lambda size: size - 30),
    ],
)
def test_a_corrupt_file_is_told_of_and_the_one_before_is_taken(folder, damage, where):
    newest, before = save_two(folder)
    damage(newest, where)
    with pytest.warns(
        RuntimeWarning, match=f"{newest} is corrupt: the SHA-256 .* Step 1 is restored, from {before}"
    ) as told:
        assert value(folder) == (1, 1.0)
    assert len(told) == 1
    assert told[0].filename == __file__


def test_a_disk_that_does_not_give_a_file_is_told_of(folder, monkeypatch):
    newest, _ = save_two(folder)
    digest = hashlib.file_digest

    def broken(file, name):
        if file.name == str(newest):
            raise OSError(5, "Input/output error")
        return digest(file, name)

    monkeypatch.setattr(hashlib, "file_digest", broken)
    with pytest.warns(RuntimeWarning, match="the disk cannot read it: Input/output error"):
        assert value(folder) == (1, 1.0)


def test_after_a_corrupt_file_the_run_goes_on_and_replaces_it(folder):
    newest, before = save_two(folder)
    truncated(newest, lambda size: 9)
    checkpointer = todist.Checkpointer(folder, keep=2)
    module = net()
    with pytest.warns(RuntimeWarning, match="is corrupt"):
        step, objects = checkpointer.restore({"net": module})
    assert step == 1
    checkpointer.save(1, objects)  # below the corrupt one's
    assert newest not in folder.iterdir()
    assert value(folder) == (1, 1.0)
    assert before.exists()


def test_where_none_is_whole_nothing_begins_anew_by_itself(folder):
    for path in save_two(folder):
        truncated(path, lambda size: 3)
    with pytest.raises(
        todist.errors.CheckpointError,
        match=r"remove the files to start afresh.*step-000000002.*step-000000001",
    ):
        value(folder)


def test_a_file_with_code_in_it_is_not_run(folder, tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "evil"),)

    path = tmp_path / "x"
    torch.save({"format": 1, "objects": Evil()}, path)
    folder.mkdir(parents=True)
    path.rename(folder / f"step-000000001-{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}.pt")
    with pytest.raises(
        todist.errors.CheckpointError, match="must have plain values and tensors only, and no code"
    ) as error:
        value(folder)
    assert isinstance(error.value.__cause__, pickle.UnpicklingError)
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("contents", [{"format": 2}, torch.ones(1)], ids=["newer", "a tensor"])
def test_a_file_of_another_format_is_refused(folder, tmp_path, contents):
    folder.mkdir(parents=True)
    path = tmp_path / "x"
    torch.save(contents, path)
    path.rename(folder / f"step-000000001-{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}.pt")
    with pytest.raises(todist.errors.CheckpointError, match="no checkpoint of this version"):
        value(folder)


def test_a_file_that_rank_zero_prunes_meanwhile_is_no_error(folder, monkeypatch):
    save_two(folder)
    find = _files.find

    def outdated(path):
        monkeypatch.setattr(_files, "find", find)
        files = find(path)
        todist.Checkpointer(folder, keep=1).save(3, {"net": net(3.0)})
        return files

    monkeypatch.setattr(_files, "find", outdated)
    assert value(folder) == (3, 3.0)


def save_and_wait(checkpointer, step, objects):
    checkpointer.save(step, objects)
    checkpointer.wait()


@pytest.fixture
def full_disk():
    """A limit of the size of files: a write fails in the middle of a file, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def set_limit(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    yield set_limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [0, 4000, 100_000, 160_000])
@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_is_an_error_that_keeps_the_old_ones(folder, full_disk, size, background, caplog):
    checkpointer = todist.Checkpointer(folder, keep=1, background=background, random_states=False)
    large = {"net": net(5.0, 40_000)}
    checkpointer.save(1, {"net": net(1.0)})
    checkpointer.wait()
    full_disk(size)
    with pytest.raises(
        OSError, match="the checkpoint of step 2 is not written, and the older ones are still there"
    ) as error:
        save_and_wait(checkpointer, 2, large)
    full_disk(resource.RLIM_INFINITY)
    assert error.value.errno == 27
    assert error.value.filename == str(folder)
    assert len(list(folder.iterdir())) == 1
    assert value(folder, random_states=False) == (1, 1.0)
    checkpointer.save(3, {"net": net(3.0)})
    checkpointer.close()
    assert value(folder) == (3, 3.0)
    assert ("the checkpoint of step 2" in caplog.text) == background


class Gate:
    """Holds up the writing of files until it is opened."""

    def __init__(self, monkeypatch):
        self.reached, self.opened = threading.Event(), threading.Event()
        self._save = torch.save
        monkeypatch.setattr(torch, "save", self.save)

    def save(self, *args):
        self.reached.set()
        assert self.opened.wait(WAIT)
        self._save(*args)


def test_in_the_background_what_was_there_at_the_call_is_written(folder, monkeypatch):
    gate = Gate(monkeypatch)
    module = net(1.0)
    optimizer = todist.Adam(module.parameters(), lr=0.1)
    module(torch.ones(2)).sum().backward()
    optimizer.step()
    objects = {
        "net": module,
        "optimizer": optimizer,
        "tree": [torch.ones(2)],
        "random": torch.Generator().manual_seed(1),
    }
    expected = [tensor.clone() for tensor in tensors(objects)]
    with todist.Checkpointer(folder, background=True) as checkpointer:
        assert checkpointer.save(1, objects)
        assert gate.reached.wait(WAIT)
        assert steps(folder) == []
        with torch.no_grad():
            for tensor in tensors(objects):
                tensor.zero_()
        objects["random"].manual_seed(2)
        gate.opened.set()
    assert steps(folder) == [1]
    _, restored = todist.Checkpointer(folder).restore(objects)
    assert all(map(torch.equal, tensors(restored), expected))
    assert restored["random"].initial_seed() == 1


def tensors(objects):
    state = objects["optimizer"].state_dict()["state"][0]
    return [objects["net"].weight, objects["tree"][0], *(state[name] for name in sorted(state))]


def test_the_next_save_waits_for_the_one_in_the_background(folder, monkeypatch):
    gate = Gate(monkeypatch)
    checkpointer = todist.Checkpointer(folder, every=2, background=True)
    checkpointer.save(2, {"net": net(2.0)})
    assert gate.reached.wait(WAIT)
    assert not checkpointer.save(3, {"net": net(3.0)}), "a step that is not saved waits for nothing"
    threading.Timer(0.05, gate.opened.set).start()
    checkpointer.save(4, {"net": net(4.0)})
    assert steps(folder)[-1] == 2
    assert checkpointer.restore({"net": net()}).step == 4


@pytest.mark.parametrize("call", ["save", "a save at another step", "restore", "wait", "close"])
def test_the_error_in_the_background_is_raised_at_the_next_call_and_once(folder, monkeypatch, call):
    done = threading.Event()

    def fail(*_):
        done.set()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    checkpointer = todist.Checkpointer(folder, every=10, background=True)
    checkpointer.save(10, {"net": net()})
    calls = {
        "save": lambda: checkpointer.save(20, {"net": net()}),
        "a save at another step": lambda: checkpointer.save(11, {"net": net()}),
        "restore": lambda: checkpointer.restore({"net": net()}),
        "wait": checkpointer.wait,
        "close": checkpointer.close,
    }
    assert done.wait(WAIT)
    checkpointer._writing.exception(WAIT)
    with pytest.raises(OSError, match="No space left on device"):
        calls[call]()
    monkeypatch.undo()
    checkpointer.close()
    assert steps(folder) == []
    with pytest.raises(ValueError, match="`save` must come before `close`"):
        checkpointer.save(20, {"net": net()})


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"keep": 0}, ValueError, "`keep` must be at least 1, got 0"),
        ({"every": 0}, ValueError, "`every` must be at least 1, got 0"),
        ({"keep": True}, TypeError, "`keep` must be an integer, got bool True"),
        ({"every": 1.5}, TypeError, "`every` must be an integer, got float 1.5"),
    ],
)
def test_bad_options(folder, options, kind, message):
    with pytest.raises(kind, match=message):
        todist.Checkpointer(folder, **options)


def test_a_folder_that_is_a_file(tmp_path):
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(
        ValueError, match=f"`folder` must be a folder, or not be there yet, got the file {path}"
    ):
        todist.Checkpointer(path)


@pytest.mark.parametrize(
    ("step", "objects", "kind", "message"),
    [
        (-1, {"a": 1}, ValueError, "`step` must be at least 0, got -1"),
        (1.0, {"a": 1}, TypeError, "`step` must be an integer, got float 1.0"),
        (1, {}, ValueError, "`objects` must have at least one object, got none"),
        (1, [1], TypeError, "`objects` must be a dict, name to object, got list"),
        (1, {1: 1}, TypeError, "`objects` must have texts as names, got int 1"),
    ],
)
def test_bad_arguments_of_save(folder, step, objects, kind, message):
    with pytest.raises(kind, match=message):
        todist.Checkpointer(folder).save(step, objects)
    assert not folder.exists()


# A part, a chosen step, the best one.


def test_a_part_is_restored_and_the_rest_and_the_generators_are_left(folder):
    checkpointer = todist.Checkpointer(folder)
    checkpointer.save(3, {"net": net(5.0), "count": 7, "other": torch.ones(2)})
    module = net(0.0)
    torch.manual_seed(1)
    step, objects = checkpointer.restore({"net": module, "count": 0}, partial=True)
    drawn = torch.rand(())
    assert (step, objects["count"], module.weight[0, 0].item()) == (3, 7, 5.0)
    assert objects.keys() == {"net", "count"}
    torch.manual_seed(1)
    assert torch.rand(()) == drawn
    with pytest.raises(ValueError, match="names that were saved, which are net, count, other, got cuont"):
        checkpointer.restore({"cuont": 0}, partial=True)
    with pytest.raises(TypeError, match="`partial` must be True or False, got int 1"):
        checkpointer.restore({"count": 0}, partial=1)


def test_a_chosen_step_is_restored_and_one_that_is_not_there_lists_those_that_are(folder):
    checkpointer = todist.Checkpointer(folder, background=True)
    for step in (10, 20, 30):
        checkpointer.save(step, {"net": net(step)})
    assert checkpointer.steps() == [10, 20, 30]
    module = net(0.0)
    assert checkpointer.restore({"net": module}, step=20).step == 20
    assert module.weight[0, 0].item() == 20
    with pytest.raises(
        ValueError, match=r"`step` must be that of a checkpoint in .*, which are 10, 20, 30, got 25"
    ):
        checkpointer.restore({"net": module}, step=25)
    with pytest.raises(ValueError, match=r"which are none, got 25"):
        todist.Checkpointer(folder / "other").restore({"net": module}, step=25)
    with pytest.raises(TypeError, match="`step` must be an integer, got str 'last'"):
        checkpointer.restore({"net": module}, step="last")
    path = next(file.path for file in _files.find(folder) if file.step == 20)
    path.write_bytes(b"x" * 100)
    with pytest.raises(todist.errors.CheckpointError, match=f"{path.name} is corrupt"):
        checkpointer.restore({"net": module}, step=20)
    assert checkpointer.restore({"net": module}, step=30).step == 30


@pytest.mark.parametrize("background", [False, True])
def test_the_best_one_is_kept_and_restored(folder, background):
    scores = [-1e-5, 0.5, torch.tensor(2.5), -float("inf"), 2.5, 1e20, 3, None, 0.0]
    with todist.Checkpointer(folder, keep=1, background=background) as checkpointer:
        for step, score in enumerate(scores):
            checkpointer.save(step, {"net": net(step)}, score=score)
            checkpointer.wait()
            if step == 4:  # of equal ones the newest
                assert checkpointer.steps() == [4]
        assert checkpointer.steps() == [5, 8]
    module = net(0.0)
    again = todist.Checkpointer(folder)
    assert again.restore({"net": module}, step="best").step == 5
    assert module.weight[0, 0].item() == 5
    assert again.restore({"net": module}).step == 8


@pytest.mark.parametrize("background", [False, True])
def test_the_best_score_is_kept_whatever_its_step_is(folder, background):
    given = [
        (7, 0.1),
        (10, 0.5),
        (25, 0.9),
        (26, 0.7),
        (27, 0.9),
        (30, None),
        (33, None),
        (40, 0.6),
        (41, None),
    ]
    with todist.Checkpointer(folder, keep=2, every=10, background=background) as checkpointer:
        written = [step for step, score in given if checkpointer.save(step, {"step": step}, score=score)]
        assert written == [7, 10, 25, 30, 40]
        assert checkpointer.restore({"step": 0}, step="best").objects == {"step": 25}
        assert checkpointer.steps() == [25, 30, 40]
        assert not checkpointer.save(42, {"step": 42}, score=-1.0)
        assert checkpointer.save(43, {"step": 43}, score=2.0)
    assert todist.Checkpointer(folder, every=10).restore({"step": 0}, step="best") == (43, {"step": 43})


def test_bad_scores_and_none(folder):
    checkpointer = todist.Checkpointer(folder)
    checkpointer.save(1, {"net": net()})
    with pytest.raises(
        ValueError, match="`step` can be 'best' where checkpoints were saved with `score=`, got none"
    ):
        checkpointer.restore({"net": net()}, step="best")
    with pytest.raises(ValueError, match="`score` must be a number that can be compared, got nan"):
        checkpointer.save(2, {"net": net()}, score=float("nan"))
    with pytest.raises(TypeError, match="`score` must be a number, got str 'x'"):
        checkpointer.save(2, {"net": net()}, score="x")
    assert checkpointer.steps() == [1]
