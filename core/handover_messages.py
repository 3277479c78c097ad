"""What workers tell each other to hand KV over. The whole set is in messages.py, its use in docs/transfer_protocol."""

from typing import Annotated

import msgspec

from .timeline import Timeline

MAX_GROUP_KEY_CHARACTERS = 256
MAX_GROUP_VALUE_BYTES = 16 * 1024


class Wire(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base of all messages: the type's name is the tag."""


class RingOffer(Wire, frozen=True):
    """The receiver made a staging ring for one sender incarnation. The number of slots is the number of credits.

    `transport` and `ring_name`: "shared_memory" and "pinned_memory": the name of a file in the common run directory,
    hexadecimal, checked; "cuda_ipc": the handle of device memory and the card it is on, checked; "gloo" and "nccl": "",
    the two form a group of their own through GroupKey; "tcp": "", slots exist only as credits.
    """

    ring_id: int
    transport: str
    ring_name: str
    num_slots: int
    slot_bytes: int


class RingGone(Wire, frozen=True):
    """One side gave the ring up (it cannot attach, a credit is missing too long, the group broke).

    What used it ends; the next hand-over gets a new one.
    """

    ring_id: int


class GroupKey(Wire, frozen=True):
    """One entry of the store through which the two ends of a "gloo" or "nccl" ring find each other."""

    ring_id: int
    key: Annotated[str, msgspec.Meta(max_length=MAX_GROUP_KEY_CHARACTERS)]
    value: Annotated[bytes, msgspec.Meta(max_length=MAX_GROUP_VALUE_BYTES)]


class KVGrant(Wire, frozen=True):
    """The receiver has blocks for the prompt and lacks the tokens from `first_missing_token` on."""

    request_id: str
    first_missing_token: int
    ring_id: int


class KVPiece(Wire, frozen=True):
    """Tokens `[start, stop)` lie in `slot` of the ring (or in the payload frame). Published by this message only."""

    request_id: str
    ring_id: int
    slot: int
    generation: int  # of the slot: a late message about an earlier use of it is refused
    start: int
    stop: int
    first_layer: int
    last_layer: int  # exclusive
    first_head: int
    last_head: int  # exclusive
    num_bytes: int
    checksum: int  # xxh3_64 of the bytes


class KVCredit(Wire, frozen=True):
    """The receiver has copied the slot out: the sender may write it again, as `generation`."""

    ring_id: int
    slot: int
    generation: int


class KVProgress(Wire, frozen=True):
    """The sender has computed that many tokens: renews the receiver's lease while the prompt waits or is long."""

    request_id: str
    num_tokens: int


class KVCommit(Wire, frozen=True):
    """All pieces are out. `hidden` is the last prompt token's state after the final norm, `[hidden_size]` float32."""

    request_id: str
    num_tokens: int
    num_cached_tokens: int  # of the prompt, found in the sender's own cache
    hidden: bytes
    hidden_checksum: int
    timeline: Timeline


class KVAbort(Wire, frozen=True):
    """Either side gives the hand-over up. The other one frees what it holds for it."""

    request_id: str
    reason: str
