"""``todist.profile``: which worker did what and when; and that a program computes the same with it."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import torchopt_dist as todist
from torchopt_dist.distributed.group.spans import Span
from torchopt_dist.distributed.profile import _clocks, _lanes_of
from torchopt_dist.errors import NotInitializedError
from torchopt_dist.process.future import Future


def noisy_loss(weight, x):
    return (nn.functional.dropout(x @ weight, 0.5) ** 2).mean()


def steps(weight, x):
    spread = todist.parallelize(todist.batch_partitioner, todist.mean_reducer)(noisy_loss)
    (grad,) = torch.autograd.grad(spread(todist.replicated(weight), x), weight, create_graph=True)
    (second,) = torch.autograd.grad((grad**2).sum(), weight)
    return second


def inputs():
    torch.manual_seed(3)
    return torch.randn(5, 2, dtype=torch.float64, requires_grad=True), torch.randn(6, 5, dtype=torch.float64)


def profiled(folder):
    plain = steps(*inputs())
    arguments = inputs()
    with todist.profile() as profile:
        with pytest.raises(RuntimeError, match="a profile is on already"), todist.profile():
            pass
        found = steps(*arguments)
    state = torch.get_rng_state()
    steps(*inputs())
    assert torch.equal(plain, found)
    assert torch.equal(state, torch.get_rng_state())  # no number was drawn for the profile
    profile.save(folder / "trace.json")
    profile.plot(folder / "timeline.png")
    return profile.names, profile.seconds, profile.spans, str(profile), profile.calls, profile.busy()


def test_each_worker_tells_what_it_did(world, tmp_path):
    names, seconds, spans, table, calls, busy = world(3).on_zero(profiled, tmp_path)

    assert all(0 <= span.start <= span.end <= seconds for span in spans)
    by_call = {}
    for span in spans:
        if span.call is not None:
            by_call.setdefault(span.call, {})[span.phase] = span
    # The forward, the recorded backward, and its backward, which reaches the forward's graph again: on three workers.
    assert calls == len(by_call) >= 9
    runs = [phases["run"].worker for phases in by_call.values() if "run" in phases]
    assert sorted(runs) == [0, 1, 2]
    backwards = [phases["backward"].worker for phases in by_call.values() if "backward" in phases]
    assert sorted(set(backwards)) == [0, 1, 2]
    for phases in by_call.values():
        work = phases.get("run") or phases["backward"]
        assert phases["pack"].worker == 0
        assert phases["pack"].peer == work.worker
        assert phases["pack"].end <= phases["receive"].end <= work.start
        assert work.end <= phases["reply"].start
        assert phases["pack"].size > 0
        assert phases["reply"].size > 0
        assert phases["reply"].end <= phases["unpack"].start
        if work.worker:
            assert phases["pack"].end <= phases["send"].start <= phases["receive"].end
    assert all(0 < part <= 1 for part in busy)

    lines = table.splitlines()
    assert lines[0].endswith(f"{calls} requests")
    assert lines[1].split()[:2] == ["worker", "pack"]
    assert [line.split()[0] for line in lines[2:]] == list(names)


def test_the_trace_links_requests_and_the_picture_is_one(world, tmp_path):
    names, _, spans, *_ = world(2).on_zero(profiled, tmp_path)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == list(names)
    assert len([e for e in events if e["ph"] == "X"]) == len(spans)
    sent = {e["id"] for e in events if e["ph"] == "s"}
    assert sent
    assert sent <= {e["id"] for e in events if e["ph"] == "f"}
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_torch_profiler_has_the_phases_as_ranges():
    @todist.auto_init_rpc()
    def main():
        with torch.profiler.profile() as profiler:
            steps(*inputs())
        return {event.key for event in profiler.key_averages()}

    assert {"todist::pack", "todist::run", "todist::backward", "todist::unpack"} <= main()


def fails():
    raise KeyError("inside")


def test_an_error_inside_ends_the_profile_and_passes():
    @todist.auto_init_rpc()
    def main():
        with pytest.raises(KeyError, match="inside"), todist.profile() as broken:
            todist.remote_call(fails, 0)
        with todist.profile() as whole:
            steps(*inputs())
        return broken, whole

    broken, whole = main()
    assert [span.phase for span in broken.spans if span.phase == "run"] == ["run"]
    assert whole.calls > broken.calls


def test_without_a_group():
    with pytest.raises(NotInitializedError), todist.profile():
        pass


def test_threads_share_a_line_where_they_do_not_overlap():
    def span(start, end, thread):
        return Span(0, "run", start, end, thread)

    one, two, three = span(0, 2, 1), span(1, 3, 2), span(2, 4, 3)
    assert _lanes_of([one, two, three]) == [[one, three], [two]]
    assert _lanes_of([]) == [[]]


def test_the_clocks_of_other_machines_are_measured():
    def ask(worker, function, seconds):
        answer = Future()
        answer.set_result([function() + 1000.0 if function is time.perf_counter else None])
        return answer

    members = [SimpleNamespace(process_table=table) for table in ("a", "a", "b")]
    group = SimpleNamespace(rank=0, names=("worker0", "worker1", "worker2"), members=members, ask=ask)
    assert _clocks(group) == {2: pytest.approx(1000.0, abs=500.0)}
