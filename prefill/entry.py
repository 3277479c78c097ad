"""PrefillEntry: what the prefill role remembers of one prompt beside its sequence."""

from dataclasses import dataclass

from ..core.messages import NodeRef
from ..core.sequence import Sequence
from ..core.timeline import Timeline


@dataclass
class PrefillEntry:
    sequence: Sequence
    gateway: NodeRef
    decode: NodeRef
    timeline: Timeline
    num_returned_tokens: int  # what the decode worker hands over before anything is computed
    arrived_at: float
    num_cached_tokens: int = 0
    num_own_blocks: int = 0  # of those it holds, beyond the prefix that was cached
