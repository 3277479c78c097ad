"""What can go wrong, by whose fault it is. Every message names what, why and the next step."""


class BatonError(Exception):
    """Base of all errors that a user may read; the text is shown without a traceback."""


class ConfigurationError(BatonError):
    """What the user asked for at start cannot be done (a missing file, an impossible size)."""


class RequestError(BatonError):
    """One request is wrong. `param` is the field at fault, as the client spelled it."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


class OutOfBlocks(BatonError):
    """The KV pool cannot give that many blocks now, even after evicting what it may."""


class LocalProtocolError(BatonError):
    """This process broke its own protocol: a bug here."""


class RemoteProtocolError(BatonError):
    """A peer broke the protocol: its message is dropped, this process goes on."""
