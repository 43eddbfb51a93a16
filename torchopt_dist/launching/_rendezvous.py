"""The hosts of a launch → the address and port at which all of their workers meet.

On one machine that is the loopback address. Between machines the agent of the first host, which has rank 0, listens at
all its addresses, an agent of each other machine tries which of them it reaches, and the first that all reach is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torchopt_dist.errors import InitializationError
from torchopt_dist.launching._handles import AgentHandle
from torchopt_dist.launching._messages import Listen, Listening, Reach
from torchopt_dist.launching._store import LOOPBACK

__all__ = ["agree"]

REACH_SECONDS = 5.0

Ask = Callable[[Sequence[AgentHandle], object], list[Any]]
"""Agents, a question → the answer of each; a lost agent or one that takes too long is an error."""


def agree(agents: Sequence[AgentHandle], port: int, ask: Ask) -> tuple[str, int]:
    """The address and the port at which workers meet: the agent of the first host listens there from now on.

    Args:
        agents: those of all hosts, the first host's first.
        port: the port; 0 means any free one.
        ask: a function from agents and a question to their answers.

    Raises:
        InitializationError: the port is taken, or not all hosts can reach the first one.
    """
    first = agents[0]
    others = {agent.machine: agent for agent in agents if agent.machine is not first.machine}
    (where,) = ask([first], Listen(port, everywhere=bool(others)))
    if where.error is not None:
        raise InitializationError(where.error + ("" if first.machine.here else f" on {first.name}"))
    if not others:
        return next(iter(where.ports.items()))
    known = [other.launcher_address for other in others] if first.machine.here else [first.machine.address]
    likely = {address: where.ports[address] for address in known if address in where.ports}
    ports = {address: port for address, port in where.ports.items() if address != LOOPBACK}
    where = replace(where, ports=likely | ports)
    answers = ask(list(others.values()), Reach(where, REACH_SECONDS))
    reached = [answer.addresses for answer in answers]
    for address, port in where.ports.items():
        if all(address in found for found in reached):
            return address, port
    raise InitializationError(_why_apart(first.name, list(others.values()), reached, where))


def _why_apart(first: str, others: list[AgentHandle], reached: list[frozenset[str]], where: Listening) -> str:
    lost = [other.name for other, found in zip(others, reached, strict=True) if not found]
    if not lost:
        names = ", ".join(other.name for other in others)
        return f"{names} reach no address of {first}, where rank 0 is, that all of them reach"
    return (
        f"{', '.join(lost)} cannot reach {first}, where rank 0 is, at any of its addresses "
        f"{', '.join(f'{address} port {port}' for address, port in where.ports.items())}: "
        "is there a firewall? `master_port` chooses the port"
    )
