"""This host's IPv4 addresses, with the standard library alone: it is loaded inside server processes too."""

from __future__ import annotations

import fcntl
import ipaddress
import socket

from asyncrl.errors import UserError

LOOPBACK, EVERYWHERE = "127.0.0.1", "0.0.0.0"
_SOMEWHERE_ELSE = "192.0.2.1"  # of a network that exists in documents alone; nothing is sent there
_GET_ADDRESS, _ANSWER_BYTES, _ADDRESS_OFFSET = 0x8915, 40, 20  # SIOCGIFADDR and its struct ifreq


def is_loopback(host: str) -> bool:
    """Whether nobody but this host gets there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_here(host: str) -> bool:
    """Whether a socket can be bound to this IPv4 address."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((str(ipaddress.IPv4Address(host)), 0))
    except (OSError, ValueError):
        return False
    return True


def addresses_of_host() -> dict[str, str]:
    """Interface to address, those of loopback last."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = name.encode()[:15].ljust(_ANSWER_BYTES, b"\0")
            try:
                answer = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, request)
            except OSError:  # this interface has none
                continue
            found[name] = socket.inet_ntoa(answer[_ADDRESS_OFFSET : _ADDRESS_OFFSET + 4])
    return dict(sorted(found.items(), key=lambda pair: is_loopback(pair[1])))


def interface_of(address: str) -> str | None:
    """The interface that has this address, where one has."""
    return next((name for name, found in addresses_of_host().items() if found == address), None)


def reachable_address() -> str:
    """How other hosts reach this one: the address from which it would speak to the world, else its first one. Raises UserError
    where there is none beyond loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_SOMEWHERE_ELSE, 9))  # chooses a route, and sends nothing
            return str(probe.getsockname()[0])
        except OSError:  # no way out
            found = [address for address in addresses_of_host().values() if not is_loopback(address)]
    if not found:
        raise UserError(
            f"cluster.bind_address is {EVERYWHERE}, but {socket.gethostname()} has no address beyond loopback at which others "
            f"could reach it: set cluster.bind_address to {LOOPBACK}"
        )
    return found[0]
