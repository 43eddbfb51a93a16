"""MASTER_ADDR → the network interface that routes to it.

On a machine with several interfaces Gloo and TensorPipe each guess one by the host's name; across two machines the
guess is often wrong, and it must be right for both.
"""

from __future__ import annotations

import ipaddress
import os
import socket

import psutil

from torchopt_dist.errors import InitializationError

__all__ = ["LOOPBACK", "VARIABLES", "check_loopback", "choose_interface", "local_address"]

LOOPBACK = "127.0.0.1"
VARIABLES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""The variables from which Gloo and TensorPipe take their interface."""


def local_address(host: str, port: int = 1) -> str:
    """The address of this machine from which packets to ``host`` leave. Nothing is sent.

    Raises:
        OSError: ``host`` is unknown, or there is no route to it.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def choose_interface(host: str) -> str | None:
    """Set ``GLOO_SOCKET_IFNAME`` and ``TP_SOCKET_IFNAME`` to the interface that routes to ``host``.

    A variable that is already set is left as it is.

    Returns:
        The interface's name, or ``None`` where it cannot be found out; then nothing is set.
    """
    try:
        address = local_address(host)
    except OSError:
        return None
    for interface, addresses in psutil.net_if_addrs().items():
        # An IPv6 address is listed with its zone ("fe80::1%eth0").
        if any(address == known.address.split("%")[0] for known in addresses):
            for variable in VARIABLES:
                os.environ.setdefault(variable, interface)
            return interface
    return None


def check_loopback(host: str) -> None:
    """Raise :class:`InitializationError` if ``host`` is a loopback address, and this machine has no way to it."""
    try:
        if not ipaddress.ip_address(host).is_loopback:
            return
    except ValueError:  # a name
        return
    try:
        local_address(host)
    except OSError as error:
        raise InitializationError(
            f"workers of one machine meet at its loopback address {host}, which this machine must have, got "
            f"{error.strerror!r}: bring up the interface `lo`, as by `ip link set lo up`"
        ) from error
