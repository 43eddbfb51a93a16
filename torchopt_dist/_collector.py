"""Importing the package → no garbage collection in its midst.

Imports make no garbage, and a full collection would walk over all of torch, which takes a third of the time that the
package takes. This module is the first that the package imports, and the package calls :func:`resume` at its end.
"""

import gc

__all__ = ["resume"]

_was_enabled = gc.isenabled()
gc.disable()


def resume() -> None:
    """Collect garbage again, if that was so before the package was imported."""
    if _was_enabled:
        gc.enable()
