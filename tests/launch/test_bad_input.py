"""What cannot be launched → a clear error within seconds that names the argument, the rule, and what was got."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest
import torch

import torchopt_dist as todist
from torchopt_dist.launch import Launcher, launch
from torchopt_dist.launch.environment import read_env_file

pytestmark = pytest.mark.timeout(60)

ON_TWO = Launcher(nproc_per_host=2, handlers=[])


def my_rank():
    return int(os.environ["RANK"])


@pytest.mark.parametrize(
    ("options", "error", "message"),
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
        ({"agent_timeout": 0}, ValueError, "`agent_timeout` must be a positive, finite number .* got 0"),
        ({"agent_timeout": 1}, ValueError, "`agent_timeout` must be at least 2 s, .* got 1"),
        ({"min_hosts": 0}, ValueError, "`min_hosts` must be at least 1, got 0"),
        ({"max_hosts": "2"}, TypeError, "`max_hosts` must be an integer or None, got '2'"),
        (
            {"min_hosts": 2},
            ValueError,
            "`min_hosts` must be at most the number of hosts that take part, 1, got 2",
        ),
        ({"halted_timeout": "x"}, TypeError, "`halted_timeout` must be a number of seconds, got 'x'"),
        ({"hosts": [3]}, TypeError, "`hosts` must hold names, got int 3"),
        ({"max_restarts": -1}, ValueError, "`max_restarts` must be at least 0, got -1"),
        ({"max_restarts": "1"}, TypeError, "`max_restarts` must be an integer, got '1'"),
        ({"master_port": 1 << 16}, ValueError, r"`master_port` must be a port, in \[0, 65536\), got 65536"),
        ({"timeout": 0}, ValueError, "`timeout` must be a positive, finite number of seconds, got 0"),
        ({"timeout": float("nan")}, ValueError, "`timeout` must be a positive, finite number .* got nan"),
        ({"start_timeout": None}, TypeError, "`start_timeout` must be a number of seconds, got None"),
        ({"handlers": ["x"]}, TypeError, "`handlers` must hold logging.Handler objects, got 'x'"),
        ({"env": {"A": 1}}, TypeError, "`env` must map strings to strings, got 'A': 1"),
        ({"env_file": "/no/such/file"}, FileNotFoundError, "/no/such/file"),
        ({"log_dir": "/dev/null/logs"}, OSError, "/dev/null/logs"),
    ],
)
def test_options_that_are_wrong_are_named(options, error, message):
    with pytest.raises(error, match=message):
        launch(my_rank, **{"nproc_per_host": 1, **options})


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
    with pytest.raises(todist.SerializationError, match=r"`args\[1\]` must be .* got lock"):
        ON_TWO.run(print, 1, lock)
    with pytest.raises(todist.SerializationError, match=r"`by` must be .* got lock"):
        ON_TWO.run(my_rank, by=lock)
    with pytest.raises(todist.SerializationError, match=r"`func` must be .* got function"):
        ON_TWO.run(lambda: lock)
    with pytest.raises(
        todist.SerializationError, match=r"rank [01] returned generator .* cannot be sent to the launcher"
    ):
        ON_TWO.run(lambda: (x for x in "ab"))
    with pytest.raises(TypeError, match="`func` must be callable, got int 3"):
        ON_TWO.run(3)
    with pytest.raises(TypeError, match="`args` must be a tuple of arguments, got str 'ab'"):
        launch(print, "ab")


class OnlyHere:
    def __reduce__(self):
        return (_only_in, (os.getpid(),))


def _only_in(pid):
    if os.getpid() != pid:
        raise ImportError(f"not in {os.getpid()}")
    return "here"


def test_what_cannot_be_read_on_the_other_side_is_told():
    with pytest.raises(todist.SerializationError, match="cannot be read on the worker: ImportError: not in"):
        ON_TWO.run(print, OnlyHere())
    with pytest.raises(
        todist.SerializationError, match="what rank 0 on localhost returned cannot be read by the launcher"
    ):
        ON_TWO.run(OnlyHere)


def test_a_port_that_is_taken():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            todist.InitializationError, match=f"`master_port` must be free .* got {port}: Addr"
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
