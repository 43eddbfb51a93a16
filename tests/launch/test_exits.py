"""``sys.exit`` on a worker → the status that the system would make of it, and its text among the last lines."""

from __future__ import annotations

import sys

import pytest

import torchopt_dist as todist
from torchopt_dist.launch import _worker as worker
from torchopt_dist.launch import launch

pytestmark = pytest.mark.timeout(60)

KINDS = {"plain": {}, "elastic": {"min_hosts": 1}}


class Mute:
    def __str__(self):
        raise RuntimeError("str")


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        (None, 0, ""),
        (0, 0, ""),
        (3, 3, ""),
        (True, 1, ""),
        (-1, 255, ""),
        (-9, 247, ""),
        (256, 0, ""),
        (10**10, 0, ""),
        ("config is missing", 1, "config is missing\n"),
        (("a", 2), 1, "('a', 2)\n"),
        (Mute(), 1, ""),
    ],
    ids=lambda part: type(part).__name__ if isinstance(part, Mute) else repr(part),
)
def test_the_status_is_what_python_and_the_system_make_of_it(code, status, said, capsys):
    assert worker.asked_to_exit(SystemExit(code)) == status
    assert capsys.readouterr() == ("", said)


def test_other_exceptions_are_no_exit(capsys):
    assert worker.asked_to_exit(KeyboardInterrupt("text")) is None
    assert worker.asked_to_exit(ValueError("text")) is None
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("kind", KINDS)
def test_a_negative_status_is_no_signal(kind):
    with pytest.raises(todist.errors.WorkerFailedError, match=r"called sys.exit\(247\)") as caught:
        launch(sys.exit, (-9,), nproc_per_host=1, log_dir=None, handlers=[], **KINDS[kind])
    assert (caught.value.exit_code, caught.value.signal) == (247, None)


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_of_an_exit_is_in_the_log_and_in_the_error(kind):
    with pytest.raises(todist.errors.WorkerFailedError, match=r"called sys.exit\(1\)") as caught:
        launch(sys.exit, ("config is missing",), nproc_per_host=1, log_dir=None, handlers=[], **KINDS[kind])
    assert caught.value.exit_code == 1
    assert caught.value.log == ("config is missing",)
    assert str(caught.value).endswith("\n    config is missing")
