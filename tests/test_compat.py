from __future__ import annotations

import os
import sys
from pathlib import Path

import torchopt_dist as todist
from tests.processes import python

ROOT = Path(__file__).parents[1]

SAME_OBJECTS = """
import torchopt_dist as ours
from torchopt_dist import compat

compat.install()
compat.install()  # a second time it does nothing

import pickle
import sys

import torchopt
import torchopt.distributed as todist
import torchopt.optim.sgd
from torchopt import MetaSGD, distributed, module_clone
from torchopt.base import GradientTransformation
from torchopt.combine import chain
from torchopt.distributed.autograd import context
from torchopt.nn import *
from torchopt import *
from torchopt.utils import extract_state_dict

assert torchopt is sys.modules["torchopt"] and todist is distributed is torchopt.distributed
assert torchopt.distributed.parallelize is todist.parallelize is ours.parallelize
assert todist.module_clone is torchopt.module_clone is module_clone is ours.module_clone
assert todist.autograd is torchopt.distributed.autograd and todist.autograd.context is context is ours.autograd.context
assert issubclass(MetaSGD, ours.MetaSGD) and GradientTransformation is ours.GradientTransformation
assert chain.flat is torchopt.chain_flat and torchopt.chain is chain
assert extract_state_dict is ours.extract_state_dict and stop_gradient is ours.stop_gradient
assert torchopt.__version__ == ours.__version__
assert "parallelize" in dir(todist) and "MetaSGD" in dir(torchopt) and "module_clone" in dir(torchopt.nn)
assert torchopt.AdaDelta is ours.Adadelta and torchopt.optim.MetaAdaGrad is ours.MetaAdagrad
assert torchopt.combine.chain_flat is chain.flat and "chain_flat" in dir(torchopt)
assert torchopt.transform.scale_by_accelerated_adam is ours.transform.scale_by_adam
assert callable(ours.optim.sgd), "an import of torchopt.optim.sgd, a module, leaves ours alone"
assert pickle.loads(pickle.dumps(torchopt.SGD)) is torchopt.SGD and issubclass(torchopt.SGD, ours.SGD)
assert not hasattr(torchopt, "NoSuchName") and not hasattr(todist, "_private")
"""


def test_torchopt_means_torchopt_dist() -> None:
    ended = python("-c", SAME_OBJECTS)
    assert ended.returncode == 0, ended.stderr


ATTRIBUTES = """
from torchopt_dist import compat

compat.install()
import torchopt  # nothing below it by name

assert torchopt.clip.clip_grad_norm is torchopt.clip_grad_norm
assert torchopt.hook.register_hook is torchopt.register_hook
assert torchopt.update.apply_updates is torchopt.apply_updates
assert torchopt.base.GradientTransformation and torchopt.utils.stop_gradient
assert torchopt.accelerated_op.accelerated_op_available is torchopt.accelerated_op_available
assert torchopt.version.__version__ == torchopt.__version__
assert torchopt.distributed.api.parallelize is torchopt.distributed.parallelize
assert torchopt.optim.meta.MetaSGD is torchopt.MetaSGD
assert torchopt.optim.func.FuncOptimizer is torchopt.FuncOptimizer
assert torchopt.combine.chain.flat(torchopt.sgd(0.1)).init
assert torchopt.linear_solve.solve_cg and torchopt.diff.implicit.custom_root and torchopt.diff.zero_order.zero_order
assert torchopt.nn.stateless.reparameterize is torchopt.nn.reparametrize
assert torchopt.diff.zero_order.nn.module.ZeroOrderGradientModule is torchopt.nn.ZeroOrderGradientModule
assert torchopt.diff.implicit.nn.module.ImplicitMetaGradientModule is torchopt.nn.ImplicitMetaGradientModule
assert torchopt.diff.zero_order.decorator.zero_order is torchopt.diff.zero_order.zero_order
assert torchopt.diff.implicit.decorator.custom_root is torchopt.diff.implicit.custom_root

import torch.distributed.rpc
from torchopt.distributed import rpc

assert torchopt.distributed.rpc is rpc is torch.distributed.rpc
"""


def test_modules_are_attributes() -> None:
    ended = python("-c", ATTRIBUTES)
    assert ended.returncode == 0, ended.stderr


DECORATOR = """
from torchopt_dist import compat

compat.install()
import torch
import torchopt
import torchopt.diff.zero_order as zero_order


@torchopt.diff.zero_order(torch.randn, method="antithetic", argnums=0, num_samples=2000, sigma=0.1)
def f(x):
    return (x * torch.tensor([1.0, -2.0])).sum()


torch.manual_seed(0)
x = torch.zeros(2, requires_grad=True)
f(x).backward()
torch.testing.assert_close(x.grad, torch.tensor([1.0, -2.0]), rtol=0, atol=0.5)
assert zero_order is torchopt.diff.zero_order and callable(zero_order.zero_order)
"""


def test_the_module_zero_order_is_a_decorator() -> None:
    ended = python("-c", DECORATOR)
    assert ended.returncode == 0, ended.stderr


IMPORTED = """
import sys

import torchopt_dist as ours
import torchopt_dist.compat as torchopt
from torchopt_dist.compat import AdaDelta, distributed as todist

assert AdaDelta is ours.Adadelta and issubclass(torchopt.MetaSGD, ours.MetaSGD)
assert todist is torchopt.distributed and todist.module_clone is ours.module_clone and todist.rpc.RRef
assert torchopt.optim.meta.MetaSGD is torchopt.MetaSGD and callable(torchopt.diff.zero_order)
try:
    torchopt.Nothing
except AttributeError as error:
    assert "there is no `torchopt.Nothing`" in str(error)
assert "torchopt" not in sys.modules, "the name stays TorchOpt's own"
try:
    import torchopt
except ModuleNotFoundError:
    pass
"""


def test_compat_itself_can_be_imported_as_torchopt() -> None:
    ended = python("-c", IMPORTED)
    assert ended.returncode == 0, ended.stderr


ORDERS = """
from torchopt_dist import compat

compat.install()
import torch
import torchopt

weight = torch.ones(1, requires_grad=True)
ours = torchopt.SGD([weight], 0.1, 0.9, 0.5, 0.0, True).param_groups[0]
names = ("lr", "momentum", "weight_decay", "dampening", "nesterov")
assert [ours[name] for name in names] == [0.1, 0.9, 0.5, 0, True]

net = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.ones_(net.weight)
torchopt.MetaSGD(net, 0.1, 0.0, 0.5).step(net(torch.ones(1)).sum())
torch.testing.assert_close(net.weight.detach(), torch.tensor([[1 - 0.1 * (1 + 0.5)]]))

for inplace in (True, False):
    gradient = torch.tensor([float("nan"), 1.0])
    init, update = torchopt.nan_to_num()
    updates, _ = update([gradient], init([gradient]), inplace=inplace)
    assert updates[0].tolist() == [0.0, 1.0]
    assert gradient.isnan().any().item() is not inplace and (updates[0] is gradient) is inplace

solver = torchopt.linear_solve.solve_inv(ns=True, maxiter=100, alpha=0.3)
torch.testing.assert_close(solver(lambda v: 2 * v, torch.ones(1)), torch.tensor([0.5]), rtol=1e-4, atol=1e-4)
assert torchopt.linear_solve.solve_inv()(lambda v: 2 * v, torch.ones(1)).item() == 0.5
"""


def test_positional_arguments_mean_what_torchopts_order_means() -> None:
    ended = python("-c", ORDERS)
    assert ended.returncode == 0, ended.stderr


TYPES = """
from torchopt_dist import compat

compat.install()
import optree
import torch
import torchopt.typing
from torchopt import pytree, typing

assert typing.Distribution is torch.distributions.Distribution and typing.Future is torch.futures.Future
assert typing.Size is torch.Size and typing.Tensor is torch.Tensor
assert typing.TupleOfTensors == tuple[torch.Tensor, ...] and typing.ListOfOptionalTensors == list[torch.Tensor | None]
assert isinstance(None, typing.OptionalTensor)
assert pytree.tree_leaves is optree.tree_leaves and pytree.tree_sum([1, 2]) == 3
assert pytree.tree_map(str, [None, 1]) == ["None", "1"]
assert pytree.tree_flatten_as_tuple([1, None, (2,)])[0] == (1, 2)
assert pytree.tree_flatten_as_tuple([1, None], none_is_leaf=True)[0] == (1, None)
leaves, spec = pytree.tree_flatten_as_tuple([1, (2,)], lambda x: isinstance(x, tuple))
assert leaves == (1, (2,)) and pytree.tree_unflatten(spec, leaves) == [1, (2,)]
"""


def test_typing_and_pytree_have_torchopts_names() -> None:
    ended = python("-c", TYPES)
    assert ended.returncode == 0, ended.stderr


ACCELERATED = """
from torchopt_dist import compat

compat.install()
import copy
import pickle

import torch
import torchopt
import torchopt_dist as ours
from torchopt.optim.adam import MetaAdam

model = torch.nn.Linear(2, 1)
for name in ("Adam", "AdamW", "MetaAdam", "MetaAdamW"):
    one, other = getattr(torchopt, name), getattr(ours, name)
    assert issubclass(one, other) and one is getattr(torchopt.optim, name)
    target = model if name.startswith("Meta") else list(model.parameters())
    for options in ({}, {"use_accelerated_op": False}, {"use_accelerated_op": None}, {"fused": False}):
        assert isinstance(one(target, 0.1, **options), other)
    optimizer = one(target, lr=0.1, use_accelerated_op=False)
    pickle.loads(pickle.dumps(copy.deepcopy(optimizer)))
    try:
        one(target, lr=0.1, fused=True, use_accelerated_op=True)
    except ValueError as error:
        assert "`use_accelerated_op` is TorchOpt's name for `fused`: give one of them" in str(error)
    else:
        raise AssertionError(name)
assert MetaAdam is torchopt.MetaAdam

w = torch.ones(2)
moved = [
    function(0.1, use_accelerated_op=given).update([w], function(0.1).init([w]), params=[w])[0][0]
    for function in (torchopt.adam, torchopt.alias.adamw)
    for given in (None, False)
]
expected = [f(0.1).update([w], f(0.1).init([w]), params=[w])[0][0] for f in (ours.adam, ours.adamw)]
torch.testing.assert_close(moved, [expected[0], expected[0], expected[1], expected[1]])

from torchopt_dist.ops import library
library._KERNELS = frozenset()  # a build without any
impl = torchopt.adam(0.1, use_accelerated_op=True)
try:
    impl.update([w], impl.init([w]), params=[w])
except RuntimeError as error:
    assert "`fused=True` cannot be used" in str(error)
else:
    raise AssertionError
"""


def test_adam_takes_torchopts_name_of_fused() -> None:
    ended = python("-c", ACCELERATED)
    assert ended.returncode == 0, ended.stderr


def test_missing_names_say_what_is_missing() -> None:
    program = """
from torchopt_dist import compat

compat.install()
import torchopt.distributed
for statement in ("import torchopt.nothing", "from torchopt import Nothing", "import torchopt.nn.nothing",
                  "from torchopt.distributed import nothing", "torchopt.Nothing", "torchopt.distributed.nothing"):
    try:
        exec(statement)
    except (ImportError, AttributeError) as error:
        print(f"{statement}: {type(error).__name__}: {error}")
"""
    lines = python("-c", program).stdout.splitlines()
    assert len(lines) == 6
    for line in lines:
        statement, kind, message = line.split(": ", 2)
        assert kind == ("ModuleNotFoundError" if "import" in statement else "AttributeError")
        assert message.startswith("there is no `torchopt.")
        assert "torchopt_dist stands in for torchopt here, and it has no such name (yet)" in message


def test_refuses_where_torchopt_is_imported_already(tmp_path: Path) -> None:
    (tmp_path / "torchopt.py").write_text("")
    program = "import torchopt; from torchopt_dist import compat; compat.install()"
    ended = python("-c", program, cwd=tmp_path)
    assert "ImportError: torchopt_dist cannot stand in for torchopt" in ended.stderr
    assert str(tmp_path / "torchopt.py") in ended.stderr


def test_a_script_runs_as_python_would_run_it(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("import torchopt\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pickle, sys\n"
        "import beside, torchopt.distributed as todist\n"
        "from torchopt_dist.distributed.life import own_process\n"
        "def function(): ...\n"
        "@todist.auto_init_rpc()\n"
        "def main():\n"
        "    [value] = todist.remote_sync_call(abs, args=(-3,), partitioner=0)\n"
        "    return value\n"
        "if __name__ == '__main__':\n"
        "    assert sys.modules['__main__'].function is function is pickle.loads(pickle.dumps(function))\n"
        "    print(sys.argv, sys.path[0], own_process._program(), os.getcwd() in sys.path, main(), sep='\\n')\n"
        "    sys.exit(7)\n"
    )
    # In a new Python, as users start it.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = python("-m", "torchopt_dist.compat", script, "--lr", "0.1", "-m", warm=False, env=env)
    assert ended.returncode == 7, ended.stderr
    assert ended.stdout.splitlines() == [
        str([str(script), "--lr", "0.1", "-m"]),
        str(tmp_path),
        str(script),
        "False",
        "3",
    ]


def test_usage_and_missing_script(tmp_path: Path) -> None:
    ended = python("-m", "torchopt_dist.compat")
    assert ended.returncode == 1
    assert ended.stderr.startswith("usage: python -m torchopt_dist.compat SCRIPT [ARGUMENT...]")
    ended = python("-m", "torchopt_dist.compat", tmp_path / "nothing.py")
    assert ended.returncode == 1
    assert f"there is no script '{tmp_path / 'nothing.py'}'" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_flat_names_stay_ours() -> None:
    assert "torchopt" not in sys.modules, "a test must not leave the stand-in behind"
    assert todist.distributed.__name__ == "torchopt_dist.distributed"


def test_the_public_names_are_what_dir_shows() -> None:
    assert dir(todist) == sorted(todist.__all__)
    assert not {"distributed", "optim", "process", "pickling", "compat"} & {*dir(todist)}
    assert dir(todist.distributed) == todist.distributed.__all__
    assert dir(todist.nn) == todist.nn.__all__
    assert dir(todist.pytree) == todist.pytree.__all__
    for module in (todist.typing, todist.transform, todist.adjoints, todist.launching):
        assert dir(module) == sorted(module.__all__)


def test_the_native_names_have_one_spelling() -> None:
    second = ("AdaDelta", "AdaGrad", "AdaMax", "RMSProp", "MetaRMSProp", "MetaAdaMax", "chain_flat")
    assert not any(hasattr(todist, name) for name in second)
    assert not hasattr(todist.pytree, "tree_leaves")
    assert not hasattr(todist.typing, "TupleOfTensors")
    assert not hasattr(todist.transform, "scale_by_accelerated_adam")
