"""Second spellings of the optimizers' names, all of them here: TorchOpt offers both."""

from torchopt_dist.optim.adadelta import Adadelta as AdaDelta
from torchopt_dist.optim.adadelta import MetaAdadelta as MetaAdaDelta
from torchopt_dist.optim.adagrad import Adagrad as AdaGrad
from torchopt_dist.optim.adagrad import MetaAdagrad as MetaAdaGrad
from torchopt_dist.optim.adamax import Adamax as AdaMax
from torchopt_dist.optim.adamax import MetaAdamax as MetaAdaMax
from torchopt_dist.optim.rmsprop import MetaRMSprop as MetaRMSProp
from torchopt_dist.optim.rmsprop import RMSprop as RMSProp

__all__ = [
    "AdaDelta",
    "AdaGrad",
    "AdaMax",
    "MetaAdaDelta",
    "MetaAdaGrad",
    "MetaAdaMax",
    "MetaRMSProp",
    "RMSProp",
]
