"""HeldMessages: what arrived before the request it speaks of, kept for a bounded time and number."""

from collections import OrderedDict

from ..core.messages import Message, NodeRef

MAX_HELD = 4096
MAX_ENDED = 4096

Key = tuple[str, NodeRef]  # (request id, the peer that speaks of it)


class HeldMessages:
    """Messages of different senders arrive in any order: a grant may come before the prompt, an abort before both."""

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._held: OrderedDict[tuple[Key, type[Message]], tuple[float, Message]] = OrderedDict()  # oldest first
        self._ended: OrderedDict[Key, bool] = OrderedDict()  # hand-over that is over |-> did it succeed

    def __len__(self) -> int:
        return len(self._held)

    def hold_unless_ended(self, key: Key, body: Message, now: float) -> None:
        """Keep the first message of each type; the oldest of all goes when there are too many."""
        if key in self._ended:
            return
        self._held.setdefault((key, type(body)), (now, body))
        if len(self._held) > MAX_HELD:
            self._held.popitem(last=False)

    def open(self, key: Key, *types: type[Message]) -> list[Message]:
        """What is held for a hand-over that starts now, in the order of `types`. It is not over any more."""
        self._ended.pop(key, None)
        found = [self._held.pop((key, kind), None) for kind in types]
        return [held[1] for held in found if held is not None]

    def end(self, key: Key, succeeded: bool) -> None:
        """Remember that this hand-over is over, so that late messages about it are not held."""
        self._ended[key] = succeeded
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def has_failed(self, key: Key) -> bool:
        """Is this hand-over remembered to have failed?"""
        return self._ended.get(key) is False

    def expire(self, now: float) -> None:
        while self._held:
            key, (since, _) = next(iter(self._held.items()))
            if now - since <= self._hold_s:
                return
            del self._held[key]

    def forget_peer(self, peer: NodeRef) -> None:
        for held in [h for h in self._held if h[0][1] == peer]:
            del self._held[held]
        for key in [k for k in self._ended if k[1] == peer]:
            del self._ended[key]
