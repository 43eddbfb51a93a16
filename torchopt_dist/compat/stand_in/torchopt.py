"""``import torchopt``, where this folder is searched for modules → torchopt_dist in its place."""

import importlib
import sys

from torchopt_dist import compat

__all__: list[str] = []

if __name__ == "torchopt":
    del sys.modules[__name__]  # for which Python then takes what is there
    compat.install()
    importlib.import_module(__name__)
