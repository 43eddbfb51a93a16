"""What still works, and what is lost, where Python lacks a private name: each is hidden here."""

from __future__ import annotations

import inspect
import multiprocessing.util
import runpy
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch

from tests.processes import python
from torchopt_dist import torch_private as private
from torchopt_dist.torch_private import interpreter

PACKAGE = Path(__file__).resolve().parents[2] / "torchopt_dist"


@pytest.mark.parametrize("hide", [False, True])
def test_no_thread_handles_an_exception_where_python_does_not_say(
    monkeypatch: pytest.MonkeyPatch, hide: bool
) -> None:
    if hide:
        monkeypatch.delattr(sys, "_current_exceptions")
    me, error = threading.get_ident(), ValueError("handled")
    assert private.exception_in(me) is None
    try:
        raise error
    except ValueError:
        assert private.exception_in(me) is (None if hide else error)
    assert private.exception_in(me) is None
    assert private.exception_in(-1) is None


@pytest.mark.parametrize("hide", [False, True])
def test_no_thread_has_a_frame_where_python_does_not_say(monkeypatch: pytest.MonkeyPatch, hide: bool) -> None:
    if hide:
        monkeypatch.delattr(sys, "_current_frames")
    frame = private.frames_of_threads().get(threading.get_ident())
    assert (frame and frame.f_back) is (None if hide else inspect.currentframe())
    assert -1 not in private.frames_of_threads()


@pytest.mark.parametrize("hide", [False, True])
def test_phases_are_no_ranges_where_the_profiler_cannot_be_asked(
    monkeypatch: pytest.MonkeyPatch, hide: bool
) -> None:
    if hide:
        monkeypatch.delattr(torch.autograd, "_profiler_enabled")
    imported = runpy.run_path(str(interpreter.__file__))  # the name is looked up when the file is imported
    assert not imported["profiler_is_on"]()
    with torch.profiler.profile(acc_events=True):  # torch 2.11 warns without
        assert imported["profiler_is_on"]() is not hide


def test_an_interpreter_has_no_options_where_they_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "from torchopt_dist.torch_private import interpreter_flags; print(interpreter_flags())"
    command = [sys.executable, "-W", "error::FutureWarning", "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=PACKAGE.parent)
    assert "-Werror::FutureWarning" in ended.stdout, ended.stderr
    monkeypatch.delattr(multiprocessing.util, "_args_from_interpreter_flags")
    assert private.interpreter_flags() == []


@pytest.mark.parametrize("hide", [False, True])
def test_finalizers_that_there_are_run_at_the_end_where_they_are_hidden(
    monkeypatch: pytest.MonkeyPatch, hide: bool
) -> None:
    class Thing:
        pass

    things = [Thing(), Thing()]
    calls: list[int] = []
    finalizer = weakref.finalize(things[0], calls.append, 0)
    registry = vars(weakref.finalize)["_registry"]
    others = {each: each.atexit for each in registry}
    with monkeypatch.context() as patch:
        if hide:
            patch.delattr(weakref.finalize, "_registry")
        private.leave_finalizers()
    later = weakref.finalize(things[1], calls.append, 1)
    assert finalizer.atexit is hide
    assert later.atexit
    things.clear()
    assert sorted(calls) == [0, 1]  # they are called as ever when their objects end
    for each, atexit in others.items():
        each.atexit = atexit


FINISH = """
import atexit, os, sys, threading, time
from torchopt_dist import torch_private

if sys.argv[1] == "hidden":
    del threading._shutdown, atexit._run_exitfuncs
started = threading.Event()


def work():
    started.wait(60)
    print("thread")


threading.Thread(target=work).start()
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
atexit.register(print, "atexit")
started.set()
torch_private.finish_interpreter()
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.parametrize(("names", "lines"), [("there", ["thread", "atexit"]), ("hidden", ["thread"])])
def test_exit_functions_do_not_run_where_they_are_hidden_but_threads_end(
    names: str, lines: list[str]
) -> None:
    ended = python("-c", FINISH, names, timeout=100, cwd=PACKAGE.parent)
    assert ended.stdout.splitlines() == lines, ended.stderr
    assert ended.returncode == 0
