"""One call across workers; ``parallelize.py`` is the place to start reading."""

from torchopt_dist.distributed import autograd
from torchopt_dist.distributed.autograd import is_available
from torchopt_dist.distributed.balance import Balance
from torchopt_dist.distributed.group.resident import Resident, Shards
from torchopt_dist.distributed.init_rpc import auto_init_rpc
from torchopt_dist.distributed.logs import log_to_rank_zero
from torchopt_dist.distributed.map import map
from torchopt_dist.distributed.messages.references import Reference
from torchopt_dist.distributed.mirror import MirroredModule, mirror
from torchopt_dist.distributed.parallelize import (
    parallelize,
    parallelize_async,
    remote_async_call,
    remote_sync_call,
)
from torchopt_dist.distributed.partition import (
    Partition,
    Partitioner,
    PartitionFunction,
    TensorDimensionPartitioner,
    batch_partitioner,
    dim_partitioner,
    replicated,
    tasks,
)
from torchopt_dist.distributed.profile import Profile, profile
from torchopt_dist.distributed.put import put
from torchopt_dist.distributed.reduce import concatenate_reducer, mean_reducer, stack_reducer, sum_reducer
from torchopt_dist.distributed.remote_call import remote_call
from torchopt_dist.distributed.status import Status, WorkerStatus, status
from torchopt_dist.distributed.world import (
    WorldInfo,
    alive,
    barrier,
    default_worker_name_format,
    get_local_rank,
    get_local_world_size,
    get_rank,
    get_worker_id,
    get_world_info,
    get_world_size,
    not_on_rank,
    on_rank,
    rank_non_zero_only,
    rank_zero_only,
)

__all__ = [
    "Balance",
    "MirroredModule",
    "Partition",
    "PartitionFunction",
    "Partitioner",
    "Profile",
    "Reference",
    "Resident",
    "Shards",
    "Status",
    "TensorDimensionPartitioner",
    "WorkerStatus",
    "WorldInfo",
    "alive",
    "auto_init_rpc",
    "autograd",
    "barrier",
    "batch_partitioner",
    "concatenate_reducer",
    "default_worker_name_format",
    "dim_partitioner",
    "get_local_rank",
    "get_local_world_size",
    "get_rank",
    "get_worker_id",
    "get_world_info",
    "get_world_size",
    "is_available",
    "log_to_rank_zero",
    "map",
    "mean_reducer",
    "mirror",
    "not_on_rank",
    "on_rank",
    "parallelize",
    "parallelize_async",
    "profile",
    "put",
    "rank_non_zero_only",
    "rank_zero_only",
    "remote_async_call",
    "remote_call",
    "remote_sync_call",
    "replicated",
    "stack_reducer",
    "status",
    "sum_reducer",
    "tasks",
]


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
