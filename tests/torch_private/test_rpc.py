"""What still works, and what is lost, where torch's remote procedure calls lack a private name: each is hidden here."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch.distributed import rpc

from torchopt_dist import torch_private as private
from torchopt_dist.torch_private import rpc as private_rpc


def test_the_default_timeout_stays_where_it_cannot_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(rpc, "_set_rpc_timeout", asked.append)
    private.set_default_rpc_timeout(3.0)
    assert asked == [3.0]
    monkeypatch.delattr(rpc, "_set_rpc_timeout")
    private.set_default_rpc_timeout(4.0)
    assert asked == [3.0]


@pytest.mark.parametrize("hide", [False, True])
def test_a_future_raises_what_its_object_says_unless_that_is_hidden(hide: bool) -> None:
    class Hides(torch.futures.Future[int]):
        def __getattribute__(self, name: str) -> Any:
            if name == "_set_unwrap_func":
                raise AttributeError(name)
            return super().__getattribute__(name)

    def unwrap(failure: str) -> NoReturn:
        raise ArithmeticError(failure)

    future: torch.futures.Future[int] = Hides() if hide else torch.futures.Future()
    private.set_failure(future, "by the object", unwrap, ArithmeticError("itself"))
    with pytest.raises(ArithmeticError, match="itself" if hide else "by the object"):
        future.wait()


def test_the_time_out_of_a_group_is_another_one_where_it_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, otherwise = dist.HashStore(), timedelta(hours=1)
    gloo = dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=7))

    class Group:
        _device_types = (torch.device("cpu"), torch.device("cuda"))

        def _get_backend(self, device: torch.device) -> Any:
            if device.type == "cuda":
                raise RuntimeError("no such backend")
            return gloo

    group: Any = Group()
    assert private.time_out_of(group, otherwise) == timedelta(seconds=7)
    with monkeypatch.context() as hidden:
        hidden.delattr(Group, "_get_backend")
        assert private.time_out_of(group, otherwise) == otherwise
    monkeypatch.delattr(Group, "_device_types")
    assert private.time_out_of(group, otherwise) == otherwise


def test_a_process_without_rpc_has_contexts_of_distributed_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch._C._distributed_autograd, "_init", asked.append)
    private.init_distributed_autograd(3)
    assert asked == [3]

    def refuse(rank: int) -> None:
        raise RuntimeError(f"initialized with another rank than {rank}")

    monkeypatch.setattr(torch._C._distributed_autograd, "_init", refuse)
    private.init_distributed_autograd(3)
    monkeypatch.delattr(torch._C._distributed_autograd, "_init")
    private.init_distributed_autograd(3)


@pytest.mark.parametrize("hide", [False, True])
def test_a_group_over_nccl_has_torchs_own_timeout_where_it_cannot_be_set(
    monkeypatch: pytest.MonkeyPatch, hide: bool
) -> None:
    class Hidden:
        __slots__ = ()

    class Named:
        _timeout = timedelta(minutes=10)

    class Group:
        """Stands for ``ProcessGroupNCCL``, which needs a GPU."""

        Options = Hidden if hide else Named

        def __init__(self, store: dist.Store, rank: int, size: int, options: Any) -> None:
            self.made_with = store, rank, size, getattr(options, "_timeout", None)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    store, limit = dist.HashStore(), timedelta(seconds=7)
    made: Any = private.nccl_group(store, 1, 2, limit)
    assert made.made_with == (store, 1, 2, None if hide else limit)


def test_options_are_torchs_own_where_the_transports_cannot_be_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(rpc, "TensorPipeRpcBackendOptions", lambda **options: asked.append(options))
    private.tensorpipe_options_with_sockets()
    assert asked == [{"_transports": ["uv"]}]

    def without_transports(*, num_worker_threads: int = 16) -> int:
        return num_worker_threads

    monkeypatch.setattr(rpc, "TensorPipeRpcBackendOptions", without_transports)
    assert private.tensorpipe_options_with_sockets() == 16


@pytest.mark.parametrize("hide", [False, True])
def test_warnings_of_cpp_code_stay_where_their_level_cannot_be_set(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], hide: bool
) -> None:
    def warn() -> str:
        with pytest.raises(RuntimeError):  # nobody listens at port 1, of which torch's C++ code warns
            torch.distributed.TCPStore("127.0.0.1", 1, timeout=timedelta(milliseconds=300))
        return capfd.readouterr().err

    if hide:
        monkeypatch.setattr(private_rpc, "CPP_LIBRARY", "none")
    before = private.set_cpp_log_level(2)
    try:
        assert (before is None) is hide
        assert ("[W" in warn()) is hide
    finally:
        if before is not None:
            assert private.set_cpp_log_level(before) == 2
    assert "[W" in warn()
