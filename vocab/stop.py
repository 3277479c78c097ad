"""StopMatcher: ends a growing text before the first stop string, without ever showing a part of one."""

from collections.abc import Sequence


class StopMatcher:
    """Watches one growing text for stop strings, character by character, whatever its chunks are.

    The text ends where the first stop string is complete; of several complete at the same character the longest
    counts. What is emitted ends before it. Text that may be the start of a stop string is held back until it is
    decided. One Knuth-Morris-Pratt automaton per stop string: the work per character does not depend on their length.

    `matched` is the stop string that ended the text, None while there is none.
    """

    def __init__(self, stop: Sequence[str]):
        """Raises ValueError for an empty stop string, which is in every text."""
        if "" in stop:
            raise ValueError("an empty stop string would end every text at once")
        self._automata = [_Automaton(text) for text in stop]
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """Add text; returns (text that is certain now, whether a stop string has ended it).

        After the end nothing more is emitted.
        """
        if self.matched is not None:
            return "", True
        if not self._automata:
            return text, False
        for position, character in enumerate(text):
            complete = [a.text for a in self._automata if a.advance(character)]
            if complete:
                self.matched = max(complete, key=len)
                seen = self._held + text[: position + 1]
                self._held = ""
                return seen[: len(seen) - len(self.matched)], True
        seen = self._held + text
        certain = len(seen) - max(a.progress for a in self._automata)
        self._held = seen[certain:]
        return seen[:certain], False

    def flush(self) -> str:
        """No more text comes: returns what was held back."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """How much of `text` the characters seen so far end with. Knuth, Morris, Pratt, SIAM J. Comput. 6 (1977)."""

    def __init__(self, text: str):
        self.text = text
        self.progress = 0
        # number of matched characters |-> length of the longest proper prefix that is also their suffix
        self._fallback = [0]
        for character in text[1:]:
            self._fallback.append(self._step(self._fallback[-1], character))

    def advance(self, character: str) -> bool:
        """Read one character; True when `text` is complete with it. Do not advance further then."""
        self.progress = self._step(self.progress, character)
        return self.progress == len(self.text)

    def _step(self, progress: int, character: str) -> int:
        while progress and self.text[progress] != character:
            progress = self._fallback[progress - 1]
        return progress + (self.text[progress] == character)
