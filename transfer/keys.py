"""ClusterKeys: one CURVE key pair for all TCP sockets of a cluster, and the check that a client has it."""

import os
import stat
import threading
from pathlib import Path
from typing import Self

import msgspec
import zmq
import zmq.utils.z85

from ..core.errors import ConfigurationError


class ClusterKeys(msgspec.Struct, frozen=True):
    """A CURVE key pair, Z85 text of 40 characters each. Whoever has the file is a member of the cluster."""

    public: str
    secret: str

    def __repr__(self) -> str:
        return f"ClusterKeys(public={self.public!r})"  # the secret must not reach a log

    @classmethod
    def create(cls, path: str | Path) -> Self:
        """Make a new pair and write it to `path` (mode 0600). Raises ConfigurationError when the file exists."""
        public, secret = zmq.curve_keypair()
        keys = cls(public.decode(), secret.decode())
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            what = f"cannot create the key file {path}: {error.strerror}"
            raise ConfigurationError(f"{what}; remove it or choose another") from error
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(keys))
        return keys

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a pair. Raises ConfigurationError when the file is missing, open to others, or no key file."""
        try:
            with open(path, "rb") as file:
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                content = file.read(4096)
        except OSError as error:
            what = f"cannot read the key file {path}: {error.strerror}"
            raise ConfigurationError(f"{what}; pass --key-file with the file the launcher made") from error
        if mode & 0o077:
            raise ConfigurationError(
                f"the key file {path} is open to other users (mode {mode:04o}); run chmod 600 on it, and make new keys "
                "if others may have read it"
            )
        try:
            keys = msgspec.json.decode(content, type=cls)
            valid = zmq.curve_public(keys.secret.encode()).decode() == keys.public
        except (msgspec.MsgspecError, ValueError, zmq.ZMQError):
            valid = False
        if not valid:
            raise ConfigurationError(f"{path} is not a key file of Baton; pass the one the launcher made")
        return keys


def secure_server(socket: "zmq.Socket[bytes]", keys: ClusterKeys) -> None:
    """Make a socket that will bind speak CURVE only. Its context needs an `Authenticator`."""
    socket.curve_server = True
    socket.curve_secretkey = keys.secret.encode()
    socket.curve_publickey = keys.public.encode()
    socket.zap_domain = b"baton"


def secure_client(socket: "zmq.Socket[bytes]", keys: ClusterKeys) -> None:
    """Make a socket that will connect speak CURVE only."""
    socket.curve_serverkey = keys.public.encode()
    socket.curve_publickey = keys.public.encode()
    socket.curve_secretkey = keys.secret.encode()


class Authenticator:
    """Answers libzmq's question (ZAP, RFC 27) who may connect: exactly the holder of the cluster's key pair.

    A thread of its own; it ends when the context is terminated.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", keys: ClusterKeys) -> None:
        self._allowed = zmq.utils.z85.decode(keys.public.encode())
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind("inproc://zeromq.zap.01")  # before any CURVE socket binds
        self._thread = threading.Thread(target=self._serve, name="zap", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the thread; call it after the context has been terminated."""
        self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                # version, request id, domain, address, routing id, mechanism, credentials...
                version, request_id, _, _, _, mechanism, *credentials = self._socket.recv_multipart()
                known = mechanism == b"CURVE" and credentials == [self._allowed]
                status = (b"200", b"OK") if known else (b"400", b"not a member of this cluster")
                self._socket.send_multipart([version, request_id, *status, b"baton" if known else b"", b""])
            except zmq.ContextTerminated:
                self._socket.close()
                return
