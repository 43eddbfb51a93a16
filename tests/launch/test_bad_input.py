"""What cannot be launched → a clear error within seconds that names the argument, the rule, and what was got."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import socket
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import torchopt_dist as todist
from tests.functions import my_rank
from tests.rows import each_row
from torchopt_dist.launching import Launcher, LaunchResult, add_launcher_args, launch, on_ranks
from torchopt_dist.launching._settings import read_env_file

pytestmark = pytest.mark.timeout(60)

ON_TWO = Launcher(nproc_per_host=2, handlers=[])


@each_row(
    ("given", "error", "message"),
    [
        ({"nproc_per_host": 0}, ValueError, "`nproc_per_host` must be at least 1, got 0"),
        ({"nproc_per_host": True}, TypeError, "`nproc_per_host` must be .*, got bool True"),
        ({"nproc_per_host": "many"}, ValueError, "`nproc_per_host` must be .*, got 'many'"),
        ({"nproc_per_host": "cpu:3"}, ValueError, "got 'cpu:3'"),
        ({"nproc_per_host": "gpu:0"}, ValueError, "must ask for at least one GPU, got 'gpu:0'"),
        ({"nproc_per_host": [1, 1]}, ValueError, r"a number for each of the 1 hosts, got \[1, 1\]"),
        ({"hosts": []}, ValueError, "`hosts` must have at least one host, got none"),
        ({"hosts": "localhost"}, TypeError, r"`hosts` must be .* a list of names, .*: write \['localhost'\]"),
        ({"hosts": ["no where"]}, ValueError, r"`hosts` must hold names of the form .* got 'no where'"),
        ({"backend": "glue"}, ValueError, "`backend` must be made of .*gloo.*, got 'glue'"),
        ({"backend": 1}, TypeError, "`backend` must be a string or None, got int 1"),
        ({"liveness": 3}, TypeError, "`liveness` must be a todist.Liveness or None, got int 3"),
        (
            {"env": {"TODIST_LIVENESS": "soon"}},
            todist.errors.InitializationError,
            "variable TODIST_LIVENESS must be as in 'interval=1,patience=10', got 'soon'",
        ),
        ({"min_hosts": 0}, ValueError, "`min_hosts` must be at least 1, got 0"),
        ({"max_hosts": "2"}, TypeError, "`max_hosts` must be an integer or None, got str '2'"),
        (
            {"min_hosts": 2},
            ValueError,
            "`min_hosts` must be at most the number of hosts that take part, 1, got 2",
        ),
        ({"timeout": "x"}, TypeError, "`timeout` must be a number of seconds, or None, got str 'x'"),
        ({"hosts": [3]}, TypeError, "`hosts` must hold names, got int 3"),
        ({"max_restarts": -1}, ValueError, "`max_restarts` must be at least 0, got -1"),
        ({"max_restarts": "1"}, TypeError, "`max_restarts` must be an integer, got str '1'"),
        ({"master_port": 1 << 16}, ValueError, r"`master_port` must be a port, in \[0, 65536\), got 65536"),
        ({"timeout": 0}, ValueError, "`timeout` must be a positive, finite number of seconds, got 0"),
        ({"timeout": float("nan")}, ValueError, "`timeout` must be a positive, finite number .* got nan"),
        (
            {"start_timeout": None},
            TypeError,
            "`start_timeout` must be a number of seconds, got NoneType None",
        ),
        ({"handlers": ["x"]}, TypeError, "`handlers` must hold logging.Handler objects, got str 'x'"),
        ({"handlers": 5}, TypeError, "`handlers` must be a list of logging handlers, or None, got int 5"),
        ({"handlers": logging.NullHandler()}, TypeError, "`handlers` must be a list .* got NullHandler"),
        ({"handlers": (h for h in ())}, TypeError, "`handlers` must be a list .* got generator"),
        ({"master_port": "x"}, TypeError, "`master_port` must be an integer, got str 'x'"),
        ({"master_port": None}, TypeError, "`master_port` must be an integer, got NoneType None"),
        ({"master_port": 1.5}, TypeError, "`master_port` must be an integer, got float 1.5"),
        ({"master_port": True}, TypeError, "`master_port` must be an integer, got bool True"),
        ({"rpc": "no"}, TypeError, "`rpc` must be True or False, got str 'no'"),
        ({"hosts": None}, TypeError, '`hosts` must be "auto", "slurm" or a list of names, got NoneType None'),
        ({"hosts": 5}, TypeError, "`hosts` must be .* got int 5"),
        ({"hosts": ["node1:0"]}, ValueError, r"ports are in \[1, 65536\), got 'node1:0'"),
        ({"hosts": ["node1:99999"]}, ValueError, r"ports are in \[1, 65536\), got 'node1:99999'"),
        ({"nproc_per_host": None}, TypeError, "`nproc_per_host` must be an integer, .* got NoneType None"),
        ({"nproc_per_host": 2.5}, TypeError, "`nproc_per_host` must be an integer, .* got float 2.5"),
        ({"nproc_per_host": [None]}, TypeError, "`nproc_per_host` must be an integer, .* got NoneType None"),
        ({"copy_env": None}, TypeError, "`copy_env` must be a list of patterns, got NoneType None"),
        ({"copy_env": [1]}, TypeError, r"`copy_env` must be a list of patterns, got \[1\]"),
        ({"log_dir": 5}, TypeError, '`log_dir` must be a folder, "auto" or None, got int 5'),
        ({"log_dir": ""}, ValueError, '`log_dir` must be a folder, "auto" or None, got an empty string'),
        ({"env_file": 5}, TypeError, "`env_file` must be a path or None, got int 5"),
        ({"python": 5}, TypeError, "`python` must be a string or None, got int 5"),
        ({"ssh_config": 5}, TypeError, "`ssh_config` must be a path or None, got int 5"),
        ({"env": ["A"]}, TypeError, r"`env` must be a dictionary or None, got list \['A'\]"),
        ({"env": {"A=B": ""}}, ValueError, "`env` must have names .* without `=`, .* got 'A=B': ''"),
        ({"env": {"": "x"}}, ValueError, "`env` must have names that are not empty .* got '': 'x'"),
        ({"env": {"A": "x\0y"}}, ValueError, r"`env` must have .* no null characters, got 'A': 'x\\x00y'"),
        ({"env": {"A": 1}}, TypeError, "`env` must map strings to strings, got 'A': 1"),
        ({"env_file": "/no/such/file"}, FileNotFoundError, "/no/such/file"),
        ({"log_dir": "/dev/null/logs"}, OSError, "/dev/null/logs"),
    ],
)
def test_options_that_are_wrong_are_named(given, error, message):
    with pytest.raises(error, match=message):
        launch(my_rank, **{"nproc_per_host": 1, **given})


def test_more_gpus_than_there_are(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="more GPUs than there are, 0 on localhost, got 'gpu'"):
        launch(my_rank, nproc_per_host="gpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="more GPUs than there are, 2 on localhost, got 'gpu:3'"):
        launch(my_rank, nproc_per_host="gpu:3")
    for asked in ("gpu", "gpu:2", "auto"):
        assert launch(my_rank, nproc_per_host=asked, handlers=[]).results == {"localhost": [0, 1]}


def test_as_many_workers_as_cores():
    cores = len(os.sched_getaffinity(0))
    for asked in ("cpu", "auto"):
        if asked == "cpu" or not torch.cuda.is_available():
            assert launch(my_rank, nproc_per_host=asked, handlers=[]).results == {
                "localhost": list(range(cores))
            }


def test_what_cannot_be_pickled_is_named():
    lock = threading.Lock()
    with pytest.raises(todist.errors.SerializationError, match=r"`args\[1\]` must be .* got lock"):
        ON_TWO.run(print, 1, lock)
    model = torch.nn.Linear(1, 1)
    model.lock = lock  # type: ignore[assignment]
    with pytest.raises(
        todist.errors.SerializationError, match=r"`args\[0\]\['net'\].lock` must be .* got lock"
    ):
        launch(len, ({"net": model},), nproc_per_host=1)
    with pytest.raises(todist.errors.SerializationError, match=r"`by` must be .* got lock"):
        ON_TWO.run(my_rank, by=lock)
    with pytest.raises(todist.errors.SerializationError, match=r"`lock` of func must be .* got lock"):
        ON_TWO.run(lambda: lock)
    with pytest.raises(
        todist.errors.SerializationError,
        match=r"rank [01] returned generator .* cannot be sent to the launcher",
    ):
        ON_TWO.run(lambda: (x for x in "ab"))
    with pytest.raises(TypeError, match="`func` must be callable, got int 3"):
        ON_TWO.run(3)
    with pytest.raises(TypeError, match="`args` must be a tuple of arguments, got str 'ab'"):
        launch(print, "ab")
    with pytest.raises(TypeError, match=r"`kwargs` must map names to values, got list \['a'\]"):
        launch(print, kwargs=["a"])
    with pytest.raises(TypeError, match=r"`kwargs` must map names to values, got dict {1: 2}"):
        launch(print, kwargs={1: 2})


def test_numbers_of_numpy_are_numbers():
    launcher = Launcher(
        nproc_per_host=np.int64(1), max_restarts=np.int32(1), timeout=np.float32(60), handlers=[]
    )
    result = launcher.run(my_rank)
    assert result.results == {"localhost": [0]}
    assert result.rank(np.int64(0)) == result.index("localhost", np.int64(0)) == 0
    assert Launcher(nproc_per_host=np.array([1]), handlers=[]).run(my_rank).results == {"localhost": [0]}


@each_row(
    ("call", "message"),
    [
        (lambda: on_ranks("x"), "`handler` must be a logging.Handler, got str 'x'"),
        (lambda: on_ranks(logging.NullHandler(), 1), "`ranks` must be a list of integers, got int 1"),
        (lambda: on_ranks(logging.NullHandler(), "01"), "`ranks` must be a list of integers, got str '01'"),
        (lambda: on_ranks(logging.NullHandler(), ["0"]), "`ranks` must hold integers, got str '0'"),
        (lambda: LaunchResult({"a": [1, 2]}).rank("0"), "`rank` must be an integer, got str '0'"),
        (lambda: LaunchResult({"a": [1, 2]}).index("a", "0"), "`local_rank` must be an integer, got str '0'"),
        (lambda: LaunchResult({"a": [1, 2]}).index("a", True), "`local_rank` must be an integer, got bool"),
        (lambda: LaunchResult({"a": [1, 2]}).index([], 0), r"`host` must be a name, got list \[\]"),
        (lambda: Launcher.from_args(3), "`args` must be what a parser has parsed, got int 3"),
        (lambda: Launcher.from_args({"rpc": True}), "`args` must be what a parser has parsed, got dict"),
        (lambda: Launcher.from_args(argparse.Namespace(rpc="no")), "`rpc` must be True or False"),
        (lambda: add_launcher_args("x"), "`parser` must be an argparse.ArgumentParser, got str 'x'"),
    ],
)
def test_arguments_of_other_functions_that_are_wrong_are_named(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_every_option_of_a_launcher_is_checked():
    for option in dataclasses.fields(Launcher):
        with pytest.raises(TypeError, match=f"`{option.name}` must be .*, got object"):
            Launcher(**{option.name: object()})


def test_a_working_folder_that_was_deleted_is_told(tmp_path, monkeypatch):
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    for log_dir in (None, "auto"):
        with pytest.raises(FileNotFoundError, match=r"the working folder, .*, has been deleted"):
            launch(my_rank, nproc_per_host=1, log_dir=log_dir)


class OnlyHere:
    def __reduce__(self):
        return (_only_in, (os.getpid(),))


def _only_in(pid):
    if os.getpid() != pid:
        raise ImportError(f"not in {os.getpid()}")
    return "here"


def test_what_cannot_be_read_on_the_other_side_is_told():
    with pytest.raises(
        todist.errors.SerializationError, match="cannot be read on the worker: ImportError: not in"
    ):
        ON_TWO.run(print, OnlyHere())
    with pytest.raises(
        todist.errors.SerializationError,
        match="what rank 0 on localhost returned cannot be read by the launcher",
    ):
        ON_TWO.run(OnlyHere)


def test_a_port_that_is_taken():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            todist.errors.InitializationError, match=f"`master_port` must be free .* got {port}: Addr"
        ):
            launch(my_rank, nproc_per_host=1, master_port=port)
    launcher = Launcher(nproc_per_host=2, master_port=port, handlers=[])
    for _ in range(2):
        assert launcher.run(lambda: os.environ["MASTER_PORT"]).rank(1) == str(port)


def test_an_environment_file_with_a_line_that_is_none(tmp_path):
    file = tmp_path / "env"
    file.write_text("A=1\nwhat is this\n")
    with pytest.raises(
        ValueError, match=r"`env_file` must hold lines NAME=value, got 'what is this' in line 2"
    ):
        read_env_file(Path(file))
    file.write_bytes(b"A=\xff\n")
    with pytest.raises(
        ValueError, match=f"`env_file` must be text in UTF-8, got {file}: .* 0xff in position 2"
    ):
        read_env_file(file)
    file.write_bytes(b"A=a\0b\n")
    with pytest.raises(ValueError, match=r"`env_file` must have .* no null characters"):
        read_env_file(file)


def test_comments_in_an_environment_file(tmp_path):
    file = tmp_path / "env"
    file.write_text("A=   # nothing\nB= x # c\nC=#x\nD=\nE =  'a # b'  # c\nF=x#y\n")
    assert read_env_file(file) == {"A": "", "B": "x", "C": "#x", "D": "", "E": "a # b", "F": "x#y"}
