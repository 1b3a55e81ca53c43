"""The network between the nodes: addresses, interfaces, and waiting for a name."""

import fcntl
import os
import socket
import struct
import time
from collections.abc import Callable
from ipaddress import ip_address

from samestep.errors import RunError
from samestep.option_names import option

OUTSIDE_ADDRESS = "203.0.113.1"  # reserved for documentation: only the default route leads there
CONNECT_S = 2  # seconds for one attempt to reach a server
SIOCGIFADDR = 0x8915  # the Linux request for the IPv4 address of an interface
NO_ANSWER = (
    "{name}:{port} does not answer after {timeout_s} s ({reason}). Check that this server is up "
    "and that no firewall is between. {option}=SECONDS waits longer"
)
NO_WAY = (
    "no route to {name} after {timeout_s} s ({reason}). Check that this node is up and that "
    "no firewall is between. On Kubernetes its name needs a headless Service with "
    "publishNotReadyAddresses, and the pods' subdomain must be the name of that Service. Elsewhere "
    "give an address: --master-addr=ADDRESS, and with c10d rendezvous --local-addr=ADDRESS. "
    "{option}=SECONDS waits longer"
)


class NetworkError(RunError):
    """Another node cannot be reached."""


def wait_for(
    name: str,
    timeout_s: float,
    on_wait: Callable[[str], None] = lambda reason: None,
    port: int | None = None,
) -> tuple[str, str]:
    """Wait until a node's name has an address, a network leads to it, and ``port`` answers.

    ``on_wait`` is called once with the reason if the first attempt fails.

    Returns:
        The node's address, and this node's own address on the way to it.
    """
    deadline = time.monotonic() + timeout_s
    has_failed = False
    while True:
        # The name of a pod is often published some seconds after the other pods have started.
        try:
            return resolve(name, port)
        except OSError as error:
            reason = str(error.strerror or error)
            if time.monotonic() + 1 > deadline:
                remedy, argument = NO_WAY, "timeout_s"
                # With a port it is the address at which the nodes of a run meet.
                if port is not None:
                    remedy, argument = NO_ANSWER, "--rdzv-conf=timeout"
                message = remedy.format(
                    name=name,
                    port=port,
                    timeout_s=timeout_s,
                    reason=reason,
                    option=option(argument),
                )
                raise NetworkError(message) from error
        if not has_failed:
            on_wait(reason)
        has_failed = True
        time.sleep(1)


def resolve(name: str, port: int | None) -> tuple[str, str]:
    """Find a node's address, and this node's own address on the way to it.

    Raises:
        OSError: if the name has no address, no network leads to it, or ``port`` does not answer.
    """
    found = socket.getaddrinfo(name, None)
    # IPv4 if it has one: interface_with finds no interface by an IPv6 address.
    *_, target = min(found, key=lambda info: info[0] != socket.AF_INET)
    address = str(target[0])
    if port is not None:
        socket.create_connection((address, port), timeout=CONNECT_S).close()
    return address, address_towards(address)


def answers(name: str, port: int) -> bool:
    """Whether a server listens there now."""
    try:
        socket.create_connection((name, port), timeout=CONNECT_S).close()
    except OSError:
        return False
    return True


def address_towards(address: str) -> str:
    """Find this node's own address on the way to ``address``; an OSError if there is no way."""
    is_this_node = ip_address(address).is_loopback
    target = address
    # Debian gives the name of this node to 127.0.1.1. Other nodes reach this node at its address
    # on the default route.
    if is_this_node:
        target = OUTSIDE_ADDRESS
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing; the kernel only chooses the way.
        error = probe.connect_ex((target, 9))
        if not error:
            return str(probe.getsockname()[0])
    # A machine without a network still reaches itself.
    if is_this_node:
        return address
    raise OSError(error, os.strerror(error))


def ipv4_address(probe: socket.socket, interface: str) -> str | None:
    """The IPv4 address of an interface; None if it has none, or if this is not Linux."""
    try:
        reply = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("40s", interface.encode()))
    except OSError:
        return None
    return socket.inet_ntoa(reply[20:24])


def interface_with(own_address: str) -> str | None:
    """Return the interface that has this IPv4 address; None for other addresses."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            if ipv4_address(probe, name) == own_address:
                return name
    return None
