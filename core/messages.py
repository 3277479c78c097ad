"""Every message that crosses a process boundary: one closed set of typed structs, nothing else travels.

A message goes inside an `Envelope` that names its sender and the incarnation it is meant for. Frames on the wire:
`[envelope]` or `[envelope, payload]`; only `KVPiece` over TCP has a payload. Encoding is msgpack through msgspec; a
frame that does not decode to exactly one of these types is dropped. `MAX_FRAME_BYTES` bounds what is decoded.

Who says what to whom:

    worker -> gateway   Hello Beat Status Tuned Goodbye TokenChunk RequestFailed CacheUpdate CacheSnapshot LedgerReport
                        Flushed
    gateway -> worker   Welcome Refused WhoAreYou Beat PeerJoined PeerLeft  GenerateRequest PrefillRequest AbortRequest
                        CacheSnapshotQuery LedgerQuery FlushCache SetRoles Drain
    worker -> worker    RingOffer RingGone GroupKey KVGrant KVPiece KVCredit KVProgress KVCommit KVAbort
"""

from enum import StrEnum
from typing import Annotated

import msgspec

from .cache_events import CacheEvent
from .ledger import Ledger
from .queueing import FCFS, QueuePolicy
from .request import FinishReason, Request, TokenLogprobs, Urgency
from .step_cost import StepCost, StepTotals
from .timeline import Timeline
from .tuner_event import TunerEvent

MAX_FRAME_BYTES = 64 * 1024 * 1024
MAX_GROUP_KEY_CHARACTERS = 256
MAX_GROUP_VALUE_BYTES = 16 * 1024


class _Wire(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base of all messages: the type's name is the tag."""


# ---- who is who ------------------------------------------------------------------------------------------------


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class NodeRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One life of one process. `incarnation` is a random 63-bit number drawn at its start."""

    node_id: str  # "decode-0", "gateway-0"
    incarnation: int


class WorkerInfo(msgspec.Struct, frozen=True, array_like=True):
    """What a worker tells about itself when it joins; the gateway introduces it to its peers with the same words."""

    ref: NodeRef
    roles: tuple[Role, ...]
    pid: int
    device: str  # for people: "cpu", "NVIDIA H200"
    model: str  # served model name
    model_digest: str  # of the weights, dtype and tokenizer: workers that differ are refused
    wire_digest: str  # BlockLayout.wire_digest: whose pieces this worker can place
    host_digest: str  # equal for workers that share memory and a run directory
    endpoints: tuple[str, ...]  # where peers reach it: ipc:// first where there is one, then tcp://
    block_size: int
    num_blocks: int
    context_length: int  # tokens a request may have in all
    max_running: int  # requests this worker takes at a time
    threads: int
    device_kind: str = "cpu"  # "cpu" or "cuda": how KV can travel
    device_uuid: str = ""  # of its card, as nvidia-smi writes it; "" on the CPU
    memory_note: str = ""  # how the size of its KV pool was found, for people; lines
    policy: QueuePolicy = FCFS  # what it was started with: a gateway that was given something else says so
    targets_s: tuple[float | None, float | None] = (None, None)  # for the first token, for each further one


# ---- envelope --------------------------------------------------------------------------------------------------


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """`receiver` is the incarnation the sender means (0: whoever listens, used before the first Welcome)."""

    sender: NodeRef
    receiver: int
    body: "Message"


# ---- membership ------------------------------------------------------------------------------------------------


class Hello(_Wire, frozen=True):
    info: WorkerInfo


class Welcome(_Wire, frozen=True):
    gateway: NodeRef
    peers: list[WorkerInfo]


class Refused(_Wire, frozen=True):
    """The worker does not fit (other model, layout, a name in use); it shows `reason` and ends."""

    reason: str


class WhoAreYou(_Wire, frozen=True):
    """The gateway does not know this incarnation (it restarted, or dropped it): say Hello again."""


class Beat(_Wire, frozen=True):
    """Sent each second from a thread of its own, so a long forward pass does not look like death."""

    sequence: int
    num_steps: int  # forward passes so far: alive but stuck shows as a number that stands still


STATUS_INTERVAL_S = 0.05  # between two of one worker, at least, while it is busy


class Status(_Wire, frozen=True):
    """A worker's load after a step that changed it; the router and /metrics read it."""

    num_waiting: int
    num_running: int
    num_waiting_tokens: int  # prompt tokens accepted and not yet computed
    free_blocks: int
    reserved_blocks: int
    private_blocks: int
    cached_blocks: int
    quarantined_blocks: int
    available_blocks: int  # free + what eviction could free now
    num_tokens_computed: int  # counted where the forward pass runs
    num_tokens_generated: int
    num_preemptions: int
    num_kv_bytes_sent: int
    num_kv_bytes_received: int
    num_handover_failures: int  # hand-overs that ended in local computation
    transports: dict[str, str] = {}  # peer's node id |-> how its KV comes here: of the ring that is there, or would be
    step_cost: StepCost | None = None  # as learned so far
    steps: StepTotals = StepTotals()
    settings: dict[str, int] = {}  # what tuners choose, or the user fixed: "token budget", "cap" ...
    roles: tuple[Role, ...] = ()  # what gateways may give it requests for now; what it has accepted it finishes anyway


class Tuned(_Wire, frozen=True):
    """The worker has changed settings by itself; /tuner shows the last ones."""

    events: list[TunerEvent]


class Goodbye(_Wire, frozen=True):
    """The worker has drained and leaves."""


class PeerJoined(_Wire, frozen=True):
    info: WorkerInfo


class PeerLeft(_Wire, frozen=True):
    ref: NodeRef


class SetRoles(_Wire, frozen=True):
    """Gateway to worker: be given requests for these roles from now on; its next Status says so to all gateways."""

    roles: tuple[Role, ...]


class Drain(_Wire, frozen=True):
    """Finish what is running, take nothing new, say Goodbye."""


# ---- requests --------------------------------------------------------------------------------------------------


class GenerateRequest(_Wire, frozen=True):
    """To the decode worker. `prefill` names the worker that computes the prompt; None: compute it here.

    `num_returned_tokens`: the decode worker's cache knows so much more of the prompt than that of the prefill worker
    (an earlier answer) that it first hands over the KV of that many tokens, in the other direction.
    """

    request: Request
    prefill: NodeRef | None
    num_returned_tokens: int = 0


class PrefillRequest(_Wire, frozen=True):
    """To the prefill worker, sent at the same time as GenerateRequest. Knows nothing of sampling."""

    request_id: str
    namespace: str
    token_ids: list[int]
    decode: NodeRef
    num_returned_tokens: int = 0  # as in GenerateRequest: wait for the KV of that many tokens before computing
    urgency: Urgency = Urgency()


class AbortRequest(_Wire, frozen=True):
    """`choice`: only this one is not wanted any more; None: none of them."""

    request_id: str
    reason: str
    choice: int | None = None


class TokenChunk(_Wire, frozen=True):
    """Tokens `[index, index + len(token_ids))` of the output of one choice.

    `num_cached_tokens` and `timeline` come with the first chunk of each choice, `finish_reason` with the last.
    `logprobs`, when asked for: one for each of `token_ids`. `prompt_logprobs`, when asked for: with the first chunk of
    the first choice, one for each prompt token but the first.
    """

    request_id: str
    choice: int
    index: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    num_cached_tokens: int | None = None  # prompt tokens that no worker computed for this request
    timeline: Timeline | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None


class RequestFailed(_Wire, frozen=True):
    """The worker cannot serve it. `retryable`: another worker, or this one later, may."""

    request_id: str
    message: str
    retryable: bool


# ---- cache events, ledger --------------------------------------------------------------------------------------


class CacheUpdate(_Wire, frozen=True):
    """What changed in the worker's radix tree. After a gap in `sequence` the gateway asks for a snapshot."""

    sequence: int
    events: list[CacheEvent]


class CacheSnapshotQuery(_Wire, frozen=True):
    pass


class CacheSnapshot(_Wire, frozen=True):
    """The whole tree; the next CacheUpdate is number `sequence` + 1."""

    sequence: int
    events: list[CacheEvent]


class LedgerQuery(_Wire, frozen=True):
    query_id: int


class LedgerReport(_Wire, frozen=True):
    query_id: int
    ledger: Ledger


class FlushCache(_Wire, frozen=True):
    query_id: int


class Flushed(_Wire, frozen=True):
    query_id: int
    num_blocks: int


# ---- hand-over of KV, worker to worker -------------------------------------------------------------------------


class RingOffer(_Wire, frozen=True):
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


class RingGone(_Wire, frozen=True):
    """One side gave the ring up (it cannot attach, a credit is missing too long, the group broke).

    What used it ends; the next hand-over gets a new one.
    """

    ring_id: int


class GroupKey(_Wire, frozen=True):
    """One entry of the store through which the two ends of a "gloo" or "nccl" ring find each other."""

    ring_id: int
    key: Annotated[str, msgspec.Meta(max_length=MAX_GROUP_KEY_CHARACTERS)]
    value: Annotated[bytes, msgspec.Meta(max_length=MAX_GROUP_VALUE_BYTES)]


class KVGrant(_Wire, frozen=True):
    """The receiver has blocks for the prompt and lacks the tokens from `first_missing_token` on."""

    request_id: str
    first_missing_token: int
    ring_id: int


class KVPiece(_Wire, frozen=True):
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


class KVCredit(_Wire, frozen=True):
    """The receiver has copied the slot out: the sender may write it again, as `generation`."""

    ring_id: int
    slot: int
    generation: int


class KVProgress(_Wire, frozen=True):
    """The sender has computed that many tokens: renews the receiver's lease while the prompt waits or is long."""

    request_id: str
    num_tokens: int


class KVCommit(_Wire, frozen=True):
    """All pieces are out. `hidden` is the last prompt token's state after the final norm, `[hidden_size]` float32."""

    request_id: str
    num_tokens: int
    num_cached_tokens: int  # of the prompt, found in the sender's own cache
    hidden: bytes
    hidden_checksum: int
    timeline: Timeline


class KVAbort(_Wire, frozen=True):
    """Either side gives the hand-over up. The other one frees what it holds for it."""

    request_id: str
    reason: str


Message = (
    Hello
    | Welcome
    | Refused
    | WhoAreYou
    | Beat
    | Status
    | Tuned
    | Goodbye
    | PeerJoined
    | PeerLeft
    | SetRoles
    | Drain
    | GenerateRequest
    | PrefillRequest
    | AbortRequest
    | TokenChunk
    | RequestFailed
    | CacheUpdate
    | CacheSnapshotQuery
    | CacheSnapshot
    | LedgerQuery
    | LedgerReport
    | FlushCache
    | Flushed
    | RingOffer
    | RingGone
    | GroupKey
    | KVGrant
    | KVPiece
    | KVCredit
    | KVProgress
    | KVCommit
    | KVAbort
)
