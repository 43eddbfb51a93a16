"""The policy of liveness: its numbers, from arguments and from the environment."""

from __future__ import annotations

import math

import pytest

import torchopt_dist as todist
from tests.rows import each_row


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", todist.Liveness(1.0, 10.0)),
        ("patience=30", todist.Liveness(1.0, 30.0)),
        (" interval=0.5 , patience=2,", todist.Liveness(0.5, 2.0)),
    ],
)
def test_the_environment_may_say_some_of_it(monkeypatch, text, expected):
    monkeypatch.setenv("TODIST_LIVENESS", text)
    assert todist.Liveness.from_environment() == expected


@pytest.mark.parametrize(
    "text", ["10", "patience", "patience=long", "hurry=1", "patience=0.5", "interval=0", "patience=inf"]
)
def test_the_environment_that_says_anything_else_is_an_error(monkeypatch, text):
    monkeypatch.setenv("TODIST_LIVENESS", text)
    with pytest.raises(todist.errors.InitializationError, match=r"TODIST_LIVENESS must be as in .*got '"):
        todist.auto_init_rpc()(lambda: None)()


@each_row(
    ("options", "message"),
    [
        ({"interval": 0}, "interval must be a positive number"),
        ({"patience": -1.0}, "patience must be a positive number"),
        ({"patience": math.nan}, "patience must be a positive number"),
        ({"interval": 5.0, "patience": 4.0}, "patience must be at least interval=5"),
    ],
)
def test_wrong_numbers_are_told(options, message):
    with pytest.raises(ValueError, match=message):
        todist.Liveness(**options)


def test_the_argument_is_a_policy_and_comes_before_the_environment(monkeypatch):
    with pytest.raises(TypeError, match=r"liveness must be a todist\.Liveness, got float 3\.0"):
        todist.auto_init_rpc(liveness=3.0)
    with pytest.raises(ValueError, match=r"on_loss must be 'end', 'continue' or 'replace', got 'stop'"):
        todist.auto_init_rpc(on_loss="stop")
    monkeypatch.setenv("TODIST_LIVENESS", "nonsense")
    assert todist.auto_init_rpc(liveness=todist.Liveness(0.1, 0.2))(todist.alive)() == (0,)
