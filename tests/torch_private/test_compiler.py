"""What is lost where torch's compiler lacks a setting: it is hidden here."""

from __future__ import annotations

import pytest

from torchopt_dist import _torch_private as private

config = pytest.importorskip("torch._dynamo.config")


def test_the_settings_hold_inside_of_the_context_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "trace_autograd_ops", False)
    with private.tracing_gradients():
        assert config.trace_autograd_ops
    assert not config.trace_autograd_ops


def test_a_setting_that_torch_lacks_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private.compiler, "_SETTINGS", (("torch._dynamo.config", "has_no_such_name", True),))
    with private.tracing_gradients():
        assert not hasattr(config, "has_no_such_name")
