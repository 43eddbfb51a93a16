"""What annotations need: the kinds of arguments, and the classes of what functions of ``torchopt_dist`` return."""

from torchopt_dist.checkpoint import Restored
from torchopt_dist.collectives.team import Team
from torchopt_dist.core.types import (
    Args,
    CopyMode,
    Device,
    KwArgs,
    LinearSolver,
    ModuleTensorContainers,
    Numeric,
    OptionalTensor,
    OptState,
    Params,
    PerLeaf,
    PyTree,
    RRef,
    Samplable,
    SampleFunc,
    Scalar,
    ScalarOrSchedule,
    Schedule,
    TensorContainer,
    TensorOrTensors,
    TensorTree,
    Updates,
)
from torchopt_dist.diff.estimate import Estimate, Estimates
from torchopt_dist.diff.inner_loop import InnerLoopResult
from torchopt_dist.distributed import (
    MirroredModule,
    Partition,
    Partitioner,
    PartitionFunction,
    Profile,
    Reference,
    Resident,
    Shards,
    Status,
    WorkerStatus,
    WorldInfo,
)
from torchopt_dist.launching import LaunchResult
from torchopt_dist.nn import LearnedHyperparameters, ModuleState
from torchopt_dist.optim import DifferentiableOptimizer
from torchopt_dist.scalars import WriteScalars
from torchopt_dist.transform import ChainedGradientTransformation, EmptyState, GradientTransformation

__all__ = [
    "Args",
    "ChainedGradientTransformation",
    "CopyMode",
    "Device",
    "DifferentiableOptimizer",
    "EmptyState",
    "Estimate",
    "Estimates",
    "GradientTransformation",
    "InnerLoopResult",
    "KwArgs",
    "LaunchResult",
    "LearnedHyperparameters",
    "LinearSolver",
    "MirroredModule",
    "ModuleState",
    "ModuleTensorContainers",
    "Numeric",
    "OptState",
    "OptionalTensor",
    "Params",
    "Partition",
    "PartitionFunction",
    "Partitioner",
    "PerLeaf",
    "Profile",
    "PyTree",
    "RRef",
    "Reference",
    "Resident",
    "Restored",
    "Samplable",
    "SampleFunc",
    "Scalar",
    "ScalarOrSchedule",
    "Schedule",
    "Shards",
    "Status",
    "Team",
    "TensorContainer",
    "TensorOrTensors",
    "TensorTree",
    "Updates",
    "WorkerStatus",
    "WorldInfo",
    "WriteScalars",
]


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
