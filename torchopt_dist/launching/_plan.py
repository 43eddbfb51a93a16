"""A launch: its task, hosts and options → the environment variables that torchrun would set for each worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torchopt_dist.launching._cluster import Host
from torchopt_dist.launching._machine import Machine
from torchopt_dist.launching._messages import Header
from torchopt_dist.launching.logs import WorkerLogs
from torchopt_dist.launching.options import LaunchOptions
from torchopt_dist.process.liveness import Liveness

__all__ = ["Plan"]


@dataclass(frozen=True)
class Plan:
    """A launch.

    Attributes:
        options: the launcher's options.
        begun: the time at which the launch began, by ``time.monotonic``.
        liveness: after how long a host or a worker that has not ended counts as lost.
        hosts: the hosts, with the number of workers on each.
        setup: a function from a machine to what its workers get from the launcher.
        task: the packed function and its arguments.
        logs: takes the workers' output.
        run_id: a unique name of this launch.
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
        """The variables that torchrun would set for a worker.

        Args:
            host: the index of the worker's host among the hosts.
            local_rank: the worker's rank there.
            master: address and port of the store at which workers meet.
            restarts: how often the workers have been started again.
            env: the environment of the worker; two of the variables are kept if they are set there.
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
