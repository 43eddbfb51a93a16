"""Exceptions that make it hard to tell of them; importable on workers."""

from __future__ import annotations


class Picky(LookupError):
    def __init_subclass__(cls, *, needed, **others):
        super().__init_subclass__(**others)


class Picked(Picky, needed=True):
    pass


class OneBase(type):
    def __new__(cls, name, bases, names):
        if len(bases) > 1:
            raise TypeError("one base only")
        return super().__new__(cls, name, bases, names)


class WithMeta(ValueError, metaclass=OneBase):
    pass


class NoDict(Exception):
    def __getattribute__(self, name):
        if name == "__dict__":
            raise RuntimeError("no dict")
        return super().__getattribute__(name)


class NoArgs(Exception):
    def __getattribute__(self, name):
        if name == "args":
            raise RuntimeError("no args")
        return super().__getattribute__(name)


class Mute(RuntimeError):
    def __str__(self):
        raise RuntimeError("no str")


class Slots(Exception):
    __slots__ = ("__hidden", "code", "unset")

    def __init__(self, code):
        super().__init__("slots")
        self.code, self.__hidden = code, -code

    @property
    def hidden(self):
        return self.__hidden


class MoreSlots(Slots):
    __slots__ = ("more",)


class Own(Exception):
    def __init__(self):
        super().__init__("own")
        self.worker, self.remote_traceback = ("mine",), "mine too"
