"""Command lines: of a program that takes a launcher's options, and of ``python -m torchopt_dist launch``."""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import time

import pytest
import tyro

from tests.launch.families import start_program
from torchopt_dist import Liveness
from torchopt_dist.launching import Launcher, add_launcher_args
from torchopt_dist.launching._command import main

pytestmark = pytest.mark.timeout(60)


def parser():
    made = argparse.ArgumentParser()
    made.add_argument("--lr", type=float, default=0.1)
    add_launcher_args(made)
    return made


def test_without_options_a_launcher_has_its_own_defaults():
    assert Launcher.from_args(parser().parse_args(["--lr", "3"])) == Launcher()


def test_every_option_is_an_argument_of_the_launcher(tmp_path):
    given = {
        "hosts": ["localhost", "localhost"],
        "nproc_per_host": 2,
        "rpc": True,
        "backend": "gloo",
        "max_restarts": 3,
        "on_loss": "continue",
        "max_replacements": 1,
        "log_dir": "logs",
        "env_file": ".env",
        "copy_env": ["A*", "B"],
        "python": "/usr/bin/python3",
        "ssh_config": "config",
        "shell": "srun --overlap -w {host}",
        "master_port": 29500,
        "timeout": 60.0,
        "start_timeout": 5.0,
        "stop_timeout": 0.5,
        "exit_timeout": 1.5,
        "liveness": Liveness(0.5, 2.5),
    }
    line = []
    for name, value in given.items():
        words = value if isinstance(value, list) else [] if value is True else [value]
        line += [f"--{name.replace('_', '-')}", *map(str, words)]
    launcher = Launcher.from_args(parser().parse_args(line))
    assert {name: getattr(launcher, name) for name in given} == given
    options = {action.dest for action in parser()._actions} - {"help", "lr"}
    elastic = {"min_hosts": 1, "max_hosts": 2}  # contradict `on_loss`
    words = [f"--{name.replace('_', '-')}={value}" for name, value in elastic.items()]
    assert vars(parser().parse_args(words)).items() >= elastic.items()
    assert options == {*given, *elastic}
    assert options == {field.name for field in dataclasses.fields(Launcher)} - {"env", "handlers"}
    for text in ("auto", "cpu", "gpu", "gpu:2"):
        assert parser().parse_args(["--nproc-per-host", text]).nproc_per_host == text
    for text in ("auto", "slurm"):
        assert parser().parse_args(["--hosts", text]).hosts == text
    assert parser().parse_args(["--timeout", "none"]).timeout is None


def test_a_parser_made_of_dataclasses_takes_a_launcher(tmp_path):
    @dataclasses.dataclass
    class Program:
        launcher: Launcher
        lr: float = 0.1

    line = [
        "--launcher.nproc-per-host",
        "2",
        "--launcher.log-dir",
        str(tmp_path),
        "--launcher.rpc",
        "--lr",
        "3",
    ]
    made = tyro.cli(Program, args=[*line, "--launcher.hosts", "localhost", "127.0.0.1"])
    assert (made.launcher.nproc_per_host, made.launcher.rpc, made.lr) == (2, True, 3.0)
    assert made.launcher.run(lambda: os.environ["RANK"]).results == {
        "localhost": ["0", "1"],
        "127.0.0.1": ["2", "3"],
    }


SCRIPT = """
import os, sys
from pathlib import Path
from beside import NAME
import torchopt_dist as todist

def square(x):
    return x * x, os.getpid()

@todist.auto_init_rpc()
def main():
    assert __name__ == "__main__" and NAME == "beside"
    if todist.get_rank() == 0:
        (value, pid), = todist.remote_sync_call(square, args=(3,), partitioner=1)
        print("SAID", value, pid != os.getpid(), sys.argv)
    if "--raise" in sys.argv and todist.get_rank() == 1:
        raise ValueError("of the script")
    if "--kill" in sys.argv and todist.get_rank() == 1:
        os.kill(os.getpid(), int(sys.argv[-1]))
    if "--exit" in sys.argv:
        sys.exit(int(sys.argv[-1]))

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("NAME = 'beside'\n")
    return tmp_path / "train.py"


def run_main(*arguments):
    return main([str(argument) for argument in arguments])


def test_a_script_runs_as_under_torchrun(script, capsys):
    assert run_main("--nproc-per-host", 2, script, "--lr", "3", "-m") == 0
    out, err = capsys.readouterr()
    assert out == f"[rank 0] SAID 9 True ['{script}', '--lr', '3', '-m']\n"
    assert err == ""


def test_a_module_runs_too(script, capsys, monkeypatch):
    monkeypatch.chdir(script.parent)
    assert run_main("--nproc-per-host", 2, "-m", "train", "x") == 0
    assert "SAID 9 True" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--raise",), 1, "ValueError: of the script"),
        (("--kill", "9"), 128 + 9, "rank 1 on localhost was ended by SIGKILL"),
        (("--kill", "40"), 128 + 40, "rank 1 on localhost was ended by signal 40"),
        (("--exit", "3"), 3, "called sys.exit(3)"),
        (("--exit", "0"), 0, ""),
    ],
)
def test_the_exit_code_tells_how_it_ended(script, capsys, arguments, code, said):
    assert run_main("--nproc-per-host", 2, script, *arguments) == code
    err = capsys.readouterr().err
    assert said in err
    assert err.count("Traceback") <= 1
    assert "runpy" not in err.partition("Traceback")[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--nproc-per-host", 2, "none.py"), "argument script: must be a file, got 'none.py'"),
        (("--max-restarts", "x", "train.py"), "argument --max-restarts: invalid int value: 'x'"),
        ((), "the following arguments are required: script"),
        (("--hosts", "a", "b", "train.py"), "take all words that follow: write `--` before the script"),
        (("--hosts", "a", "train.py", "--lr", "3"), "take all words that follow: write `--` before"),
    ],
)
def test_a_wrong_command_line_is_told(script, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(script.parent)
    with pytest.raises(SystemExit) as ending:
        run_main(*arguments)
    assert ending.value.code == 2
    assert message in capsys.readouterr().err


def test_a_launch_that_cannot_be_is_told_without_a_traceback(script, capsys):
    assert run_main("--nproc-per-host", 0, script) == 2
    err = capsys.readouterr().err
    assert err == "python -m torchopt_dist launch: `nproc_per_host` must be at least 1, got 0\n"


def test_ctrl_c_ends_the_command(tmp_path):
    (tmp_path / "sleep.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(60)\n")
    code = "import sys\nfrom torchopt_dist.launching._command import main\nsys.exit(main(sys.argv[1:]))\n"
    job = start_program(code, "--nproc-per-host", "2", tmp_path / "sleep.py")
    assert job.first_line() == "[rank 0] up\n"
    started = time.monotonic()
    job.send_signal(signal.SIGINT)
    out, err = job.communicate(timeout=20)
    assert (job.returncode, out, err) == (130, "[rank 0] up\n", "")
    assert time.monotonic() - started < 5


def test_words_of_an_option_end_at_two_dashes(script, capsys):
    assert run_main("--nproc-per-host", 1, "--hosts", "localhost", "localhost", "--", script, "--lr") == 0
    assert "SAID 9 True" in capsys.readouterr().out


def test_an_environment_file_that_is_no_text_is_told(script, capsys, tmp_path):
    (tmp_path / "binary").write_bytes(b"A=\xff")
    assert run_main("--env-file", tmp_path / "binary", "--nproc-per-host", 1, script) == 2
    assert f"`env_file` must be text in UTF-8, got {tmp_path}/binary" in capsys.readouterr().err
