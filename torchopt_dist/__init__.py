"""Distributed differentiable optimization: gradients through optimization, on many workers.

``import torchopt_dist as todist`` has what programs call. The links of chains are in ``todist.transform``, the classes
of what functions return in ``todist.typing``, and each other kind of function in a module of its own.
"""

import sys
from typing import TYPE_CHECKING, Any

from torchopt_dist import (
    attribution,
    data,
    diff,
    errors,
    launching,
    linalg,
    linear_solve,
    nn,
    nonlinear_solve,
    ops,
    pytree,
    schedule,
    transform,
    typing,
    visual,
)
from torchopt_dist.arguments.missing_names import missing_name, tell_missing_names
from torchopt_dist.arguments.options import hint_all
from torchopt_dist.attribution import attribute
from torchopt_dist.checkpoint import Checkpointer
from torchopt_dist.collectives.team import team
from torchopt_dist.core.rematerialized import remat
from torchopt_dist.diff import adjoints
from torchopt_dist.diff.adjoints import (
    SAMA,
    EvolutionStrategies,
    FiniteDifference,
    FirstOrder,
    Implicit,
    PersistentEvolutionStrategies,
    Recorded,
    Replayed,
    Reptile,
    Truncated,
)
from torchopt_dist.diff.data_parallel import DataParallel, mean_over, sum_over, vary_over
from torchopt_dist.diff.estimate import estimate
from torchopt_dist.diff.inner_loop import inner_loop
from torchopt_dist.distributed import (
    Balance,
    alive,
    auto_init_rpc,
    autograd,
    barrier,
    batch_partitioner,
    concatenate_reducer,
    dim_partitioner,
    get_local_rank,
    get_local_world_size,
    get_rank,
    get_worker_id,
    get_world_info,
    get_world_size,
    log_to_rank_zero,
    map,
    mean_reducer,
    mirror,
    not_on_rank,
    on_rank,
    parallelize,
    parallelize_async,
    profile,
    put,
    rank_non_zero_only,
    rank_zero_only,
    remote_async_call,
    remote_call,
    remote_sync_call,
    replicated,
    stack_reducer,
    status,
    sum_reducer,
    tasks,
)
from torchopt_dist.errors import (
    CallTimeoutError,
    PeerFailedError,
    RemoteError,
    TodistError,
    WorkerFailedError,
    WorkerLostError,
)
from torchopt_dist.launching import Launcher, launch
from torchopt_dist.launching import _worker as launch_worker
from torchopt_dist.nn import extract_state_dict, learned, module_clone, recover_state_dict, stop_gradient
from torchopt_dist.optim import (
    LAMB,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Adan,
    FuncOptimizer,
    Lion,
    MetaAdadelta,
    MetaAdafactor,
    MetaAdagrad,
    MetaAdam,
    MetaAdamax,
    MetaAdamW,
    MetaAdan,
    MetaLAMB,
    MetaLion,
    MetaMuon,
    MetaOptimizer,
    MetaRAdam,
    MetaRMSprop,
    MetaSGD,
    Muon,
    Optimizer,
    RAdam,
    RMSprop,
    adadelta,
    adafactor,
    adagrad,
    adam,
    adamax,
    adamw,
    adan,
    apply_updates,
    differentiable,
    lamb,
    lion,
    muon,
    radam,
    rmsprop,
    sgd,
)
from torchopt_dist.process.liveness import Liveness
from torchopt_dist.scalars import scalar_writer
from torchopt_dist.transform import chain

__version__ = "0.1.0"

launch_worker.connect_rpc = auto_init_rpc  # what `Launcher(rpc=True)` does

__all__ = [
    "LAMB",
    "SAMA",
    "SGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Adan",
    "Balance",
    "CallTimeoutError",
    "Checkpointer",
    "DataParallel",
    "EvolutionStrategies",
    "FiniteDifference",
    "FirstOrder",
    "FuncOptimizer",
    "Implicit",
    "Launcher",
    "Lion",
    "Liveness",
    "MetaAdadelta",
    "MetaAdafactor",
    "MetaAdagrad",
    "MetaAdam",
    "MetaAdamW",
    "MetaAdamax",
    "MetaAdan",
    "MetaLAMB",
    "MetaLion",
    "MetaMuon",
    "MetaOptimizer",
    "MetaRAdam",
    "MetaRMSprop",
    "MetaSGD",
    "Muon",
    "Optimizer",
    "PeerFailedError",
    "PersistentEvolutionStrategies",
    "RAdam",
    "RMSprop",
    "Recorded",
    "RemoteError",
    "Replayed",
    "Reptile",
    "TodistError",
    "Truncated",
    "WorkerFailedError",
    "WorkerLostError",
    "__version__",
    "adadelta",
    "adafactor",
    "adagrad",
    "adam",
    "adamax",
    "adamw",
    "adan",
    "adjoints",
    "alive",
    "apply_updates",
    "attribute",
    "attribution",
    "auto_init_rpc",
    "autograd",
    "barrier",
    "batch_partitioner",
    "chain",
    "concatenate_reducer",
    "data",
    "diff",
    "differentiable",
    "dim_partitioner",
    "errors",
    "estimate",
    "extract_state_dict",
    "get_local_rank",
    "get_local_world_size",
    "get_rank",
    "get_worker_id",
    "get_world_info",
    "get_world_size",
    "inner_loop",
    "lamb",
    "launch",
    "launching",
    "learned",
    "linalg",
    "linear_solve",
    "lion",
    "log_to_rank_zero",
    "map",
    "mean_over",
    "mean_reducer",
    "mirror",
    "module_clone",
    "muon",
    "nn",
    "nonlinear_solve",
    "not_on_rank",
    "on_rank",
    "ops",
    "parallelize",
    "parallelize_async",
    "profile",
    "put",
    "pytree",
    "radam",
    "rank_non_zero_only",
    "rank_zero_only",
    "recover_state_dict",
    "remat",
    "remote_async_call",
    "remote_call",
    "remote_sync_call",
    "replicated",
    "rmsprop",
    "scalar_writer",
    "schedule",
    "sgd",
    "stack_reducer",
    "status",
    "stop_gradient",
    "sum_over",
    "sum_reducer",
    "tasks",
    "team",
    "transform",
    "typing",
    "vary_over",
    "visual",
]


def __dir__() -> list[str]:
    """The public names, without private modules."""
    return sorted(__all__)


hint_all(
    *(attribution, schedule, data, linear_solve, nonlinear_solve, nn, visual, diff.implicit, diff.zero_order),
    sys.modules[__name__],
    but=("apply_updates", "launch"),  # one is called in every step, and the other has words of its own
)

if not TYPE_CHECKING:  # which would take every name for one that exists

    def __getattr__(name: str) -> Any:
        """A name of TorchOpt's that has another place here, or another name."""
        if name.startswith("_"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from torchopt_dist.compat import _second_names

        if name in _second_names.SECOND_NAMES:
            return _second_names.SECOND_NAMES[name]
        raise missing_name(__name__, name, __all__, _PLACES)

    _PLACES = tell_missing_names(
        *(
            attribution,
            transform,
            typing,
            errors,
            schedule,
            data,
            linear_solve,
            nonlinear_solve,
            linalg,
            nn,
            diff,
            adjoints,
        ),
        *(autograd, launching, ops, pytree, visual, diff.implicit, diff.zero_order, sys.modules[__name__]),
    )
