"""Every message that crosses a process boundary: one closed set of typed structs, nothing else travels.

A message goes inside an `Envelope` that names its sender and the incarnation it is meant for. Frames on the wire:
`[envelope]` or `[envelope, payload]`; only `KVPiece` over TCP has a payload. Encoding is msgpack through msgspec; a
frame that does not decode to exactly one of these types is dropped. `MAX_FRAME_BYTES` bounds what is decoded.

Who says what to whom:

    worker -> gateway   Hello Beat Status Tuned Goodbye TokenChunk TokenChunks RequestFailed CacheUpdate
                        CacheSnapshot LedgerReport Flushed
    gateway -> worker   Welcome Refused WhoAreYou Beat PeerJoined PeerLeft  GenerateRequest PrefillRequest AbortRequest
                        CacheSnapshotQuery LedgerQuery FlushCache SetRoles Drain
    worker -> worker    RingOffer RingGone GroupKey KVGrant KVPiece KVCredit KVProgress KVCommit KVAbort
"""

from enum import StrEnum

import msgspec

from .cache_events import CacheEvent
from .handover_messages import GroupKey as GroupKey
from .handover_messages import KVAbort as KVAbort
from .handover_messages import KVCommit as KVCommit
from .handover_messages import KVCredit as KVCredit
from .handover_messages import KVGrant as KVGrant
from .handover_messages import KVPiece as KVPiece
from .handover_messages import KVProgress as KVProgress
from .handover_messages import RingGone as RingGone
from .handover_messages import RingOffer as RingOffer
from .handover_messages import Wire
from .ledger import Ledger
from .queueing import FCFS, QueuePolicy
from .request import FinishReason, Request, TokenLogprobs, Urgency
from .step_cost import StepCost, StepTotals
from .timeline import Timeline
from .tuner_event import TunerEvent

MAX_FRAME_BYTES = 64 * 1024 * 1024


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


class Hello(Wire, frozen=True):
    info: WorkerInfo


class Welcome(Wire, frozen=True):
    gateway: NodeRef
    peers: list[WorkerInfo]


class Refused(Wire, frozen=True):
    """The worker does not fit (other model, layout, a name in use); it shows `reason` and ends."""

    reason: str


class WhoAreYou(Wire, frozen=True):
    """The gateway does not know this incarnation (it restarted, or dropped it): say Hello again."""


class Beat(Wire, frozen=True):
    """Sent each second from a thread of its own, so a long forward pass does not look like death."""

    sequence: int
    num_steps: int  # forward passes so far: alive but stuck shows as a number that stands still


STATUS_INTERVAL_S = 0.05  # between two of one worker, at least, while it is busy


class Status(Wire, frozen=True):
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
    # peer's node id |-> how its KV comes here: of the ring that is there, or would be
    transports: dict[str, str] = msgspec.field(default_factory=dict)
    step_cost: StepCost | None = None  # as learned so far
    steps: StepTotals = StepTotals()
    # what tuners choose, or the user fixed: "token budget", "cap" ...
    settings: dict[str, int] = msgspec.field(default_factory=dict)
    roles: tuple[Role, ...] = ()  # what gateways may give it requests for now; what it has accepted it finishes anyway


class Tuned(Wire, frozen=True):
    """The worker has changed settings by itself; /tuner shows the last ones."""

    events: list[TunerEvent]


class Goodbye(Wire, frozen=True):
    """The worker has drained and leaves."""


class PeerJoined(Wire, frozen=True):
    info: WorkerInfo


class PeerLeft(Wire, frozen=True):
    ref: NodeRef


class SetRoles(Wire, frozen=True):
    """Gateway to worker: be given requests for these roles from now on; its next Status says so to all gateways."""

    roles: tuple[Role, ...]


class Drain(Wire, frozen=True):
    """Finish what is running, take nothing new, say Goodbye."""


# ---- requests --------------------------------------------------------------------------------------------------


class GenerateRequest(Wire, frozen=True):
    """To the decode worker. `prefill` names the worker that computes the prompt; None: compute it here.

    `num_returned_tokens`: the decode worker's cache knows so much more of the prompt than that of the prefill worker
    (an earlier answer) that it first hands over the KV of that many tokens, in the other direction.
    """

    request: Request
    prefill: NodeRef | None
    num_returned_tokens: int = 0


class PrefillRequest(Wire, frozen=True):
    """To the prefill worker, sent at the same time as GenerateRequest. Knows nothing of sampling."""

    request_id: str
    namespace: str
    token_ids: list[int]
    decode: NodeRef
    num_returned_tokens: int = 0  # as in GenerateRequest: wait for the KV of that many tokens before computing
    urgency: Urgency = Urgency()


class AbortRequest(Wire, frozen=True):
    """`choice`: only this one is not wanted any more; None: none of them."""

    request_id: str
    reason: str
    choice: int | None = None


class TokenChunk(Wire, frozen=True):
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


class TokenChunks(Wire, frozen=True):
    """What one step has brought for requests of one gateway, in one message: each costs as much as many tokens do."""

    chunks: list[TokenChunk]


class RequestFailed(Wire, frozen=True):
    """The worker cannot serve it. `retryable`: another worker, or this one later, may."""

    request_id: str
    message: str
    retryable: bool


# ---- cache events, ledger --------------------------------------------------------------------------------------


class CacheUpdate(Wire, frozen=True):
    """What changed in the worker's radix tree. After a gap in `sequence` the gateway asks for a snapshot."""

    sequence: int
    events: list[CacheEvent]


class CacheSnapshotQuery(Wire, frozen=True):
    pass


class CacheSnapshot(Wire, frozen=True):
    """The whole tree; the next CacheUpdate is number `sequence` + 1."""

    sequence: int
    events: list[CacheEvent]


class LedgerQuery(Wire, frozen=True):
    query_id: int


class LedgerReport(Wire, frozen=True):
    query_id: int
    ledger: Ledger


class FlushCache(Wire, frozen=True):
    query_id: int


class Flushed(Wire, frozen=True):
    query_id: int
    num_blocks: int


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
    | TokenChunks
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
