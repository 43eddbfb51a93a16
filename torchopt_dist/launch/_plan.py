"""What a launch is to do: what, where, and by which options → what torchrun would tell each worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torchopt_dist._liveness import Liveness
from torchopt_dist.launch._cluster import Host
from torchopt_dist.launch._machine import Machine
from torchopt_dist.launch._messages import Header
from torchopt_dist.launch.logs import WorkerLogs
from torchopt_dist.launch.options import LaunchOptions

__all__ = ["Plan"]


@dataclass(frozen=True)
class Plan:
    """All that a launch is to do.

    Attributes:
        options: those that the launcher was given.
        begun: when the launch has begun, by ``time.monotonic``.
        liveness: when a host or a worker is lost that has not ended.
        hosts: where, and how many workers.
        setup: machine → what its workers take over.
        task: the packed function and its arguments.
        logs: where the workers' output goes.
        run_id: a name of this launch that no other has.
    """

    options: LaunchOptions
    begun: float
    liveness: Liveness
    hosts: list[Host]
    setup: Callable[[Machine], Header]
    task: bytes
    logs: WorkerLogs
    run_id: str

    def variables(
        self,
        host: int,
        local_rank: int,
        master: tuple[str, int],
        restarts: int,
        env: Mapping[str, str],
        incarnation: int = 0,
    ) -> dict[str, str]:
        """What torchrun sets for one worker.

        Args:
            host: the worker's host, by its place among the hosts.
            local_rank: the worker's rank there.
            master: address and port of the store at which workers meet.
            restarts: how often the workers have been started again.
            env: the environment, two variables of which are left as they are if they are set.
            incarnation: how often the rank has been given to a new process.
        """
        here = self.hosts[host]
        rank, world_size = here.first_rank + local_rank, sum(each.workers for each in self.hosts)
        variables = {
            "RANK": rank,
            "LOCAL_RANK": local_rank,
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": here.workers,
            "GROUP_RANK": host,
            "GROUP_WORLD_SIZE": len(self.hosts),
            "ROLE_NAME": "default",
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": world_size,
            "MASTER_ADDR": master[0],
            "MASTER_PORT": master[1],
            "TORCHELASTIC_RUN_ID": self.run_id,
            "TORCHELASTIC_RESTART_COUNT": restarts,
            "TORCHELASTIC_MAX_RESTARTS": self.options.max_restarts,
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": env.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", 1),
        }
        if self.options.on_loss == "replace":
            variables["TODIST_INCARNATION"] = incarnation
        if here.workers > 1 and "OMP_NUM_THREADS" not in env:
            variables["OMP_NUM_THREADS"] = 1
        return {name: str(value) for name, value in variables.items()}
