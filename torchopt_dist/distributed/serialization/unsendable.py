"""What could not be packed → the place of the part that is why, as the beginning of an error's text."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from torchopt_dist.distributed.messages.payload import Payload
from torchopt_dist.distributed.serialization.pickling import pack
from torchopt_dist.errors import SerializationError
from torchopt_dist.pickling.unsendable import find_unsendable

__all__ = ["place_in_payload", "place_in_values"]


def place_in_payload(payload: Payload, *, main_by_name: bool) -> str:
    """The place of what cannot be sent among the function and the arguments, such as ``"args[0].weight: "``."""
    named: list[tuple[str, Any]] = [("func", payload.function)]
    for args, kwargs in payload.tasks:
        named += [("args", args), ("kwargs", kwargs)]
    return _place(named, main_by_name)


def place_in_values(values: Iterable[Any]) -> str:
    """The same among the values of a reply, such as ``"result['loss']: "``."""
    return _place([("result", value) for value in values], main_by_name=True)


def _place(named: Iterable[tuple[str, Any]], main_by_name: bool) -> str:
    found = find_unsendable(named, partial(_can_be_sent, main_by_name=main_by_name))
    return "" if found is None else f"{found[0]}: "


def _can_be_sent(part: Any, main_by_name: bool) -> bool:
    try:
        pack(part, main_by_name=main_by_name)
    except SerializationError:
        return False
    return True
