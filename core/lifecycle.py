"""The life of one request on one worker: phase x event -> phase. Anything not in the table is a bug here.

What a worker owns in each phase (each row frees exactly this when it is left for FINISHED):

    phase       decode worker                                     prefill worker
    WAITING     nothing                                           one KVSender
    RECEIVING   lock on the matched prefix, reserved blocks,      the same (it receives a prefix that decode has),
                one KVReceiver (and a KVSender that returns a     one KVSender
                prefix)
    COMPUTING   lock on the matched prefix, private blocks        the same, one KVSender
    HANDING_OVER  -                                               lock on the inserted prefix, one KVSender
    RUNNING     lock on the matched prefix, private blocks        -
    FINISHED    nothing (what it leaves to choices of the same    nothing
                prompt that wait is theirs: decode/forks.py)

Preemption sends a COMPUTING or RUNNING sequence back to WAITING; its full blocks stay in the radix tree while they can.
"""

from enum import StrEnum

from .errors import LocalProtocolError


class Phase(StrEnum):
    WAITING = "waiting"
    RECEIVING = "receiving"
    COMPUTING = "computing"
    HANDING_OVER = "handing_over"
    RUNNING = "running"
    FINISHED = "finished"


class Event(StrEnum):
    GRANTED = "granted"  # decode reserved blocks and told prefill
    ADMITTED = "admitted"  # blocks are there, the prompt is computed here
    KV_COMMITTED = "kv_committed"  # all KV and the hidden state are in
    PREFIX_RETURNED = "prefix_returned"  # prefill: the prefix that decode had is in, or will not come
    KV_FAILED = "kv_failed"  # the hand-over ended early: compute the rest here
    FORKED = "forked"  # decode: another choice of the same prompt has its KV; the first token can be sampled
    PROMPT_COMPUTED = "prompt_computed"  # decode: the first token can be sampled
    PROMPT_HANDED_ON = "prompt_handed_on"  # prefill: the last chunk is computed
    PREEMPTED = "preempted"
    ENDED = "ended"  # finished, aborted, failed or expired


TRANSITIONS: dict[Phase, dict[Event, Phase]] = {
    Phase.WAITING: {
        Event.GRANTED: Phase.RECEIVING,
        Event.ADMITTED: Phase.COMPUTING,
        Event.FORKED: Phase.RUNNING,
        Event.ENDED: Phase.FINISHED,
    },
    Phase.RECEIVING: {
        Event.KV_COMMITTED: Phase.RUNNING,
        Event.KV_FAILED: Phase.COMPUTING,
        Event.PREFIX_RETURNED: Phase.COMPUTING,
        Event.ENDED: Phase.FINISHED,
    },
    Phase.COMPUTING: {
        Event.PROMPT_COMPUTED: Phase.RUNNING,
        Event.PROMPT_HANDED_ON: Phase.HANDING_OVER,
        Event.PREEMPTED: Phase.WAITING,
        Event.ENDED: Phase.FINISHED,
    },
    Phase.HANDING_OVER: {
        Event.ENDED: Phase.FINISHED,
    },
    Phase.RUNNING: {
        Event.PREEMPTED: Phase.WAITING,
        Event.ENDED: Phase.FINISHED,
    },
    Phase.FINISHED: {},
}


def advance(phase: Phase, event: Event) -> Phase:
    """The next phase. Raises LocalProtocolError for a pair the table does not have."""
    try:
        return TRANSITIONS[phase][event]
    except KeyError:
        raise LocalProtocolError(f"a request in phase {phase} cannot take the event {event}") from None
