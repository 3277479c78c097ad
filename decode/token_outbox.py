"""TokenOutbox: the tokens of one step on their way to the gateways, each of which is told once."""

from collections.abc import Callable

from ..core.messages import Message, NodeRef, TokenChunk, TokenChunks


class TokenOutbox:
    """`tell` sends one message; what was added goes out at `flush`, in its order."""

    def __init__(self, tell: Callable[[NodeRef, Message], None]):
        self._tell = tell
        self._held: dict[NodeRef, list[TokenChunk]] = {}

    def add(self, gateway: NodeRef, chunk: TokenChunk) -> None:
        self._held.setdefault(gateway, []).append(chunk)

    def flush(self) -> None:
        held, self._held = self._held, {}
        for gateway, chunks in held.items():
            self._tell(gateway, chunks[0] if len(chunks) == 1 else TokenChunks(chunks))
