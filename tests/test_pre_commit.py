"""``.pre-commit-config.yaml`` → hooks that check a commit as ``make lint types`` does, without a network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / ".pre-commit-config.yaml"


def test_the_configuration_is_valid() -> None:
    command = [sys.executable, "-m", "pre_commit", "validate-config", str(CONFIG)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_hooks_run_what_is_installed() -> None:
    (repo,) = yaml.safe_load(CONFIG.read_text("utf-8"))["repos"]
    assert repo["repo"] == "local"
    commands = {hook["id"]: hook["entry"].split() for hook in repo["hooks"]}
    assert commands.keys() == {"ruff", "ruff-format", "mypy"}
    assert all(hook["language"] == "system" for hook in repo["hooks"])
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for program, *arguments in commands.values():
        assert Path(program).parent == Path(".venv/bin")
        checked = " ".join([Path(program).name, *arguments[:1]])
        assert f"$(BIN)/{checked}\n" in makefile or f"$(BIN)/{checked} " in makefile


def test_a_commit_with_an_unused_import_is_refused(tmp_path: Path) -> None:
    def run(*command: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PRE_COMMIT_HOME": str(tmp_path / "cache")}
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)

    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("ruff", "mypy"):
        found = shutil.which(name, path=str(Path(sys.executable).parent))
        assert found is not None
        (programs / name).symlink_to(found)
    (tmp_path / "setup.cfg").write_text("[mypy]\nfiles = good.py\n")
    shutil.copy(CONFIG, tmp_path)
    (tmp_path / "good.py").write_text("x: int = 3\n")
    (tmp_path / "bad.py").write_text("import os\nprint(undefined)\n")
    run("git", "init", "-q")
    run("git", "add", "good.py", CONFIG.name)
    ended = run(sys.executable, "-m", "pre_commit", "run", "--all-files")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    run("git", "add", "bad.py")
    ended = run(sys.executable, "-m", "pre_commit", "run", "--all-files")
    assert ended.returncode == 1
    assert "undefined" in ended.stdout
