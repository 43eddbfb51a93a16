"""An optimizer as a function → two classes: one moves parameters in place, one is differentiable."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from torchopt_dist.optim._signatures import arguments_of
from torchopt_dist.optim._state import COUNT
from torchopt_dist.optim.meta_optimizer import MetaOptimizer
from torchopt_dist.optim.optimizer import Optimizer
from torchopt_dist.transform.adadelta import adadelta
from torchopt_dist.transform.adafactor import adafactor
from torchopt_dist.transform.adagrad import adagrad
from torchopt_dist.transform.adam import adam, adamw
from torchopt_dist.transform.adamax import adamax
from torchopt_dist.transform.adan import adan
from torchopt_dist.transform.lamb import lamb
from torchopt_dist.transform.lion import lion
from torchopt_dist.transform.muon import muon
from torchopt_dist.transform.radam import radam
from torchopt_dist.transform.rmsprop import rmsprop
from torchopt_dist.transform.sgd import sgd
from torchopt_dist.transform.trace import TraceState

__all__ = [
    "LAMB",
    "SGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Adan",
    "Lion",
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
    "MetaRAdam",
    "MetaRMSprop",
    "MetaSGD",
    "Muon",
    "RAdam",
    "RMSprop",
]


class Adadelta(Optimizer, transformation=adadelta, lr=1.0):
    """Adadelta in place, as ``torch.optim.Adadelta``."""

    _counts_for_torch = True

    @arguments_of(adadelta, Optimizer)
    def __init__(self, params: Iterable[Any], *args: Any, **kwargs: Any) -> None: ...


class MetaAdadelta(MetaOptimizer, transformation=adadelta, lr=1.0, moment_requires_grad=True):
    """Adadelta that one can differentiate through."""

    @arguments_of(adadelta, MetaOptimizer)
    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None: ...


class Adafactor(Optimizer, transformation=adafactor):
    """Adafactor in place, as ``torch.optim.Adafactor``."""

    @arguments_of(adafactor, Optimizer)
    def __init__(self, params: Iterable[Any], *args: Any, **kwargs: Any) -> None: ...


class MetaAdafactor(MetaOptimizer, transformation=adafactor):
    """Adafactor that one can differentiate through."""

    @arguments_of(adafactor, MetaOptimizer)
    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None: ...


class Adagrad(Optimizer, transformation=adagrad):
    """Adagrad in place, as ``torch.optim.Adagrad``.

    It takes sparse gradients, such as those of ``torch.nn.Embedding(sparse=True)``, if there is no ``weight_decay``,
    and changes only the rows that they have.
    """

    @arguments_of(adagrad, Optimizer)
    def __init__(self, params: Iterable[Any], *args: Any, **kwargs: Any) -> None: ...


class MetaAdagrad(MetaOptimizer, transformation=adagrad):
    """Adagrad that one can differentiate through."""

    @arguments_of(adagrad, MetaOptimizer)
    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None: ...


class Adam(Optimizer, transformation=adam):
    """Adam in place, as ``torch.optim.Adam``."""

    _decouples = False

    @arguments_of(adam, Optimizer)
    def __init__(self, params: Iterable[Any], *args: Any, **kwargs: Any) -> None: ...


class MetaAdam(MetaOptimizer, transformation=adam, moment_requires_grad=True):
    """Adam that one can differentiate through."""

    @arguments_of(adam, MetaOptimizer)
    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None: ...


class AdamW(Optimizer, transformation=adamw):
    """Adam with decoupled weight decay in place, as ``torch.optim.AdamW``."""

    _decouples = True

    @arguments_of(adamw, Optimizer)
    def __init__(self, params: Iterable[Any], *args: Any, **kwargs: Any) -> None: ...


class MetaAdamW(MetaOptimizer, transformation=adamw):
    """Adam with decoupled weight decay that one can differentiate through."""

    @arguments_of(adamw, MetaOptimizer)
    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None: ...


class Adamax(Optimizer, transformation=adamax, lr=2e-3, eps=1e-8):
    """Adamax in place, as ``torch.optim.Adamax``."""

    @arguments_of(adamax, Optimizer)
    def __init__(self, params: Iterable[Any], *args: Any, **kwargs: Any) -> None: ...


class MetaAdamax(MetaOptimizer, transformation=adamax, lr=2e-3, eps=1e-8, moment_requires_grad=True):
    """Adamax that one can differentiate through."""

    @arguments_of(adamax, MetaOptimizer)
    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None: ...


class Adan(Optimizer, transformation=adan):
    """Adan in place."""

    @arguments_of(adan, Optimizer)
    def __init__(self, params: Iterable[Any], *args: Any, **kwargs: Any) -> None: ...


class MetaAdan(MetaOptimizer, transformation=adan, moment_requires_grad=True):
    """Adan that one can differentiate through."""

    @arguments_of(adan, MetaOptimizer)
    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None: ...


class LAMB(Optimizer, transformation=lamb):
    """LAMB in place."""

    @arguments_of(lamb, Optimizer)
    def __init__(self, params: Iterable[Any], *args: Any, **kwargs: Any) -> None: ...


class MetaLAMB(MetaOptimizer, transformation=lamb, moment_requires_grad=True):
    """LAMB that one can differentiate through."""

    @arguments_of(lamb, MetaOptimizer)
    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None: ...


class Lion(Optimizer, transformation=lion):
    """Lion in place."""

    @arguments_of(lion, Optimizer)
    def __init__(self, params: Iterable[Any], *args: Any, **kwargs: Any) -> None: ...


class MetaLion(MetaOptimizer, transformation=lion, moment_requires_grad=True):
    """Lion that one can differentiate through."""

    @arguments_of(lion, MetaOptimizer)
    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None: ...


class Muon(Optimizer, transformation=muon):
    """Muon in place, as ``torch.optim.Muon``."""

    @arguments_of(muon, Optimizer)
    def __init__(self, params: Iterable[Any], *args: Any, **kwargs: Any) -> None: ...


class MetaMuon(MetaOptimizer, transformation=muon, moment_requires_grad=True):
    """Muon that one can differentiate through."""

    @arguments_of(muon, MetaOptimizer)
    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None: ...


class RAdam(Optimizer, transformation=radam, eps=1e-8):
    """RAdam in place, as ``torch.optim.RAdam``."""

    _decouples = False

    @arguments_of(radam, Optimizer)
    def __init__(self, params: Iterable[Any], *args: Any, **kwargs: Any) -> None: ...


class MetaRAdam(MetaOptimizer, transformation=radam, eps=1e-8, moment_requires_grad=True):
    """RAdam that one can differentiate through."""

    @arguments_of(radam, MetaOptimizer)
    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None: ...


class RMSprop(Optimizer, transformation=rmsprop):
    """RMSprop in place, as ``torch.optim.RMSprop``."""

    _counts_for_torch = True

    @arguments_of(rmsprop, Optimizer)
    def __init__(self, params: Iterable[Any], *args: Any, **kwargs: Any) -> None: ...


class MetaRMSprop(MetaOptimizer, transformation=rmsprop):
    """RMSprop that one can differentiate through."""

    @arguments_of(rmsprop, MetaOptimizer)
    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None: ...


class SGD(Optimizer, transformation=sgd):
    """Stochastic gradient descent in place, as ``torch.optim.SGD``."""

    @arguments_of(sgd, Optimizer)
    def __init__(self, params: Iterable[Any], *args: Any, **kwargs: Any) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        """The state and the options, as torch's: a parameter that is known to have had no gradient has no running sum.

        Torch's class takes a first gradient for a later one, and dampens it, where there is a sum, be it 0.
        """
        packed = super().state_dict()
        packed["state"] = {
            index: {key: value for key, value in held.items() if key not in TraceState._fields}
            if isinstance(held, dict) and _is_unmoved(held)
            else held
            for index, held in packed["state"].items()
        }
        return packed


def _is_unmoved(held: dict[str, Any]) -> bool:
    count = held.get(COUNT)
    return isinstance(count, Tensor) and count.numel() == 1 and not count


class MetaSGD(MetaOptimizer, transformation=sgd, moment_requires_grad=True):
    """Stochastic gradient descent that one can differentiate through.

    The name is TorchOpt's. For the method Meta-SGD, which learns a rate for each entry, pass it the rates of
    ``todist.learned(module, lr=0.1, entries=True)``.
    """

    @arguments_of(sgd, MetaOptimizer)
    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None: ...
