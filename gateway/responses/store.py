"""ResponseStore: answers that can be fetched and continued later. In memory, bounded, the least used go first."""

import threading
from collections import OrderedDict

import msgspec

MAX_RESPONSES = 4096
MAX_BYTES = 128 * 1024**2


class StoredResponse(msgspec.Struct, frozen=True):
    """JSON: the answer as it was told, and all items up to its end, from the conversation's beginning.

    `num_input_items` of the conversation were there before the answer; `item_ids`: of its own input and its output.
    """

    answer: bytes
    conversation: bytes
    num_input_items: int = 0
    item_ids: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        return len(self.answer) + len(self.conversation)


class ResponseStore:
    """Nobody sees what another owner stored. Threads may use it: long bodies are parsed on one."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES):
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()  # least recently used first
        self._holders: dict[tuple[str, str], str] = {}  # (owner, item id) |-> response that has it
        self._lock = threading.Lock()
        self.num_bytes = 0

    def put(self, owner: str, response_id: str, stored: StoredResponse) -> None:
        """`response_id` is a new one. What is larger than the whole store is not kept."""
        with self._lock:
            self._kept[owner, response_id] = stored
            self.num_bytes += stored.num_bytes
            self._holders.update(((owner, item_id), response_id) for item_id in stored.item_ids)
            while len(self._kept) > self._max_responses or self.num_bytes > self._max_bytes:
                self._remove(next(iter(self._kept)))

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        with self._lock:
            stored = self._kept.get((owner, response_id))
            if stored is not None:
                self._kept.move_to_end((owner, response_id))
            return stored

    def holder(self, owner: str, item_id: str) -> StoredResponse | None:
        """The response that has this item, as input or output."""
        with self._lock:
            return self._kept.get((owner, self._holders.get((owner, item_id), "")))

    def delete(self, owner: str, response_id: str) -> bool:
        """False: it was not there."""
        with self._lock:
            is_there = (owner, response_id) in self._kept
            if is_there:
                self._remove((owner, response_id))
            return is_there

    def _remove(self, key: tuple[str, str]) -> None:
        stored = self._kept.pop(key)
        self.num_bytes -= stored.num_bytes
        owner, response_id = key
        for item_id in stored.item_ids:
            if self._holders.get((owner, item_id)) == response_id:
                del self._holders[owner, item_id]
