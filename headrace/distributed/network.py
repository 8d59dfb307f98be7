"""Connects machines that share a secret: keys made of it, and this machine's address on the network between them.

Sockets between machines are ZeroMQ's with CURVE: whoever opens a connection has to know the listener's public key, to
which its first message is sealed, and each message after is encrypted and authenticated. Both keys are made of the
secret, and the public one is published nowhere, so that without the secret nobody gets as far as a first message.
Imports no torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import socket
import struct
from pathlib import Path

import msgspec
import zmq
from zmq.utils import z85

from headrace.distributed.ranks import LOOPBACK
from headrace.errors import ConfigError

SECRET_CHARS = 16
"""Fewest characters of a secret: whoever records a connection can try guesses at leisure."""
HEARTBEAT_MS = 2000
SILENCE_MS = 10_000
"""How often ends of a connection tell each other that they are there, and after how long without it one is gone."""
KEEPALIVE_SECONDS = 60
"""So often an idle connection sends something, before a firewall between could forget it."""
SIOCGIFADDR = 0x8915


class Keys(msgspec.Struct, frozen=True):
    """Holds the pair of keys that all machines have, in Z85."""

    public: bytes
    private: bytes

    @classmethod
    def of(cls, secret: str) -> Keys:
        """Return the keys made of a secret, by scrypt (RFC 7914), so that a guess costs some 50 ms."""
        key = hashlib.scrypt(secret.encode(), salt=b"headrace nodes", n=2**14, r=8, p=1, dklen=32)
        private = z85.encode(key)
        return cls(zmq.curve_public(private), private)

    def bind(self, socket: zmq.Socket[bytes], *endpoints: str) -> int:
        """Bind a socket, which takes only connections of those who know the secret; return the port of the last
        endpoint, 0 if it has none."""
        socket.curve_server = True
        self._secure(socket, endpoints[-1])
        for each in endpoints:
            socket.bind(each)
        return port_of(socket)

    def connect(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        """Connect a socket to those alone who know the secret."""
        socket.curve_serverkey = self.public
        self._secure(socket, endpoint)
        socket.connect(endpoint)

    def _secure(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        socket.curve_publickey, socket.curve_secretkey = self.public, self.private
        for option, value in (
            (zmq.IPV6, "[" in endpoint),
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_SECONDS),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, SILENCE_MS),
        ):
            socket.setsockopt(option, value)


def connect(socket: zmq.Socket[bytes], address: str, keys: Keys | None) -> None:
    """Connect a socket to an address of this machine, or with `keys` of another one."""
    if keys is None:
        socket.connect(address)
    else:
        keys.connect(socket, address)


def read_keys(secret: str, secret_file: str | None) -> Keys:
    """Return the keys of a secret, or of the one in a file. Raises ConfigError if there is none, or it is too short."""
    where = "HEADRACE_SECRET"
    if secret_file is not None:
        where = f"secret_file {secret_file!r}"
        try:
            secret = Path(secret_file).read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"{where} cannot be read: {error}") from None
    secret = secret.strip()
    mended = "`openssl rand -hex 32` makes one, which must be the same on every node"
    if not secret:
        raise ConfigError(
            f"several machines need a secret that they share, in HEADRACE_SECRET or a --secret-file: {mended}"
        )
    if len(secret) < SECRET_CHARS:
        raise ConfigError(f"{where} must have at least {SECRET_CHARS} characters, got {len(secret)}: {mended}")
    if not zmq.has("curve"):
        raise ConfigError("several machines need a ZeroMQ with CURVE, as in pyzmq's wheels; this build has none")
    return Keys.of(secret)


def resolve(name: str, value: str) -> str:
    """Return the address of a host. Raises ConfigError, naming the setting that holds it."""
    try:
        return str(socket.getaddrinfo(value, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{name} {value!r} is not a host that this machine knows: {error}") from None


def endpoint(address: str, port: int | str) -> str:
    """Return the ZeroMQ endpoint of a port, `*` for any that is free."""
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def port_of(socket: zmq.Socket[bytes]) -> int:
    """Return the port of the endpoint that a socket was bound to last; 0: it has none."""
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    port = endpoint.decode().rpartition(":")[2] if isinstance(endpoint, bytes) else ""
    return int(port) if port.isdigit() else 0


def data_address(host: str, interface: str, master: str) -> str:
    """Return the address at which this machine's ranks listen for those of others: the host's (VLLM_HOST_IP) or the
    interface's (GLOO_SOCKET_IFNAME) if it is given, else the one from which this machine reaches `master`. Raises
    ConfigError if there is none."""
    if host:
        return resolve("VLLM_HOST_IP", host)
    if interface:
        if found := _first_address(interface):
            return found
        raise ConfigError(f"GLOO_SOCKET_IFNAME {interface!r} is no network interface with an IPv4 address here")
    if master in ("0.0.0.0", "::"):
        raise ConfigError(f"master_addr {master} names all networks: give this machine's own address in VLLM_HOST_IP")
    with socket.socket(socket.AF_INET6 if ":" in master else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((master, 9))  # which sends nothing
        except OSError as error:
            raise ConfigError(f"master_addr {master} cannot be reached from this machine: {error}") from None
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """Return the name of the network interface with an IPv4 address, for libraries that want a name. Raises ConfigError
    if none is found."""
    if address.startswith("127."):
        return LOOPBACK
    for _, name in socket.if_nameindex():
        if _first_address(name) == address:
            return name
    raise ConfigError(
        f"no network interface has {address} as its first IPv4 address: name the one between the machines in "
        "NCCL_SOCKET_IFNAME"
    )


def _first_address(interface: str) -> str:
    """Return the first IPv4 address of an interface; empty: it has none, or is not there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(found[20:24])
