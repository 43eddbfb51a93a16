"""A program that uses TorchOpt's implicit gradients in both of their styles → the closed form's numbers, by compat."""

from __future__ import annotations

from pathlib import Path

from tests.processes import python

PROGRAM = """
import torch
import torchopt

torch.manual_seed(0)
X, y = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, dtype=torch.float64)


def closed_form(meta):
    return torch.linalg.solve(X.T @ X + torch.eye(3, dtype=X.dtype), X.T @ y + meta)


def stationary(params, meta, X, y):
    return X.T @ (X @ params - y) + params - meta


@torchopt.diff.implicit.custom_root(stationary, argnums=1, solve=torchopt.linear_solve.solve_normal_cg(rtol=1e-12))
def solver(params, meta, X, y):
    params = params.detach().requires_grad_()
    optimizer = torchopt.FuncOptimizer(torchopt.sgd(lr=0.05))
    for _ in range(800):
        loss = 0.5 * ((X @ params - y) ** 2).sum() + 0.5 * ((params - meta) ** 2).sum()
        params = optimizer.step(loss, (params,))[0].detach().requires_grad_()
    return params


meta = torch.randn(3, dtype=torch.float64, requires_grad=True)
(functional,) = torch.autograd.grad(solver(torch.zeros(3, dtype=X.dtype), meta, X, y).pow(2).sum(), meta)


class Inner(torchopt.nn.ImplicitMetaGradientModule, linear_solve=torchopt.linear_solve.solve_normal_cg(rtol=1e-12)):
    def __init__(self, meta_net):
        super().__init__()
        self.meta_net = meta_net
        self.net = torchopt.module_clone(meta_net, by="deepcopy", detach_buffers=True)

    def objective(self, x, y):
        pairs = zip(self.parameters(), self.meta_parameters())
        return 0.5 * ((self.net(x)[:, 0] - y) ** 2).sum() + 0.5 * sum(((p - q) ** 2).sum() for p, q in pairs)

    def solve(self, x, y):
        params = tuple(self.parameters())
        optimizer = torchopt.SGD(params, lr=0.05)
        with torch.enable_grad():
            for _ in range(800):
                optimizer.zero_grad()
                self.objective(x, y).backward(inputs=params)
                optimizer.step()
        return self


meta_net = torch.nn.Linear(3, 1, bias=False).double()
with torch.no_grad():
    meta_net.weight.copy_(meta)
inner = Inner(meta_net).solve(X, y)
inner.net.weight.pow(2).sum().backward()
(exact,) = torch.autograd.grad(closed_form(meta).pow(2).sum(), meta)
torch.testing.assert_close(functional, exact)
torch.testing.assert_close(meta_net.weight.grad[0], exact)
print("both are right")
"""


def test_both_styles_of_implicit_maml(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    ended = python("-W", "error", "-m", "torchopt_dist.compat", script, timeout=100)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "both are right\n"
