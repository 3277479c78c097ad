"""How a message becomes frames and back: `[envelope]` or `[envelope, payload]`, msgpack through msgspec, nothing else.

A frame that does not decode to exactly one of the types of core/messages.py is no message; nothing on any socket is
ever executed.
"""

from typing import NamedTuple

import msgspec

from ..core.errors import BatonError
from ..core.messages import MAX_FRAME_BYTES, Envelope, Message, NodeRef

MAX_QUEUED_MESSAGES = 16_384  # per connection and direction; beyond that sending says PeerUnreachable
ANYONE = 0  # receiver incarnation of a message to whoever listens

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


class PeerUnreachable(BatonError):
    """The message was not sent: the receiver is not known here, or does not read what is already queued for it."""


class Incoming(NamedTuple):
    """One message as it came in. `payload` is the raw second frame of a piece sent over TCP."""

    sender: NodeRef
    body: Message
    payload: memoryview | None = None


def encode(sender: NodeRef, receiver: int, body: Message) -> bytes:
    """The envelope frame. `receiver` is the incarnation meant (`ANYONE` before it is known)."""
    return _encoder.encode(Envelope(sender, receiver, body))


def decode(frame: bytes, me: NodeRef) -> Envelope | None:
    """The envelope in `frame`; None when it is none, too long, or meant for another incarnation than `me`."""
    if len(frame) > MAX_FRAME_BYTES:
        return None
    try:
        envelope = _decoder.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return envelope if envelope.receiver in (ANYONE, me.incarnation) else None
