"""On ``PYTHONPATH``: torch as it is built without RPC, since its C++ code says so before ``torch.distributed`` asks."""

from __future__ import annotations

import sys


class Hides:
    """A finder of modules that finds none, and sees who is looked for."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "torch.distributed":
            for start in ("_rpc_init", "_dist_autograd_init", "_faulty_agent_init"):
                vars(sys.modules["torch._C"]).pop(start, None)


sys.meta_path.insert(0, Hides())
