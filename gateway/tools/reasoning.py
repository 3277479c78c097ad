"""ReasoningParser: what a model thinks before it answers, between <think> and </think>, apart from its answer. Pure."""

from ..deltas import Piece, PieceParser, Reasoning

BEGIN, END = "<think>", "</think>"


class ReasoningParser:
    """A PieceParser around the one for the answer itself.

    Only what an answer begins with can be reasoning; `is_inside`: the prompt has begun it already (the mark may come
    again). White space around reasoning is dropped. Without an end mark all of it is reasoning.
    """

    def __init__(self, answer: PieceParser, *, is_inside: bool):
        self._answer = answer
        self._is_inside = is_inside
        self._held = ""
        self._state = self._at_start
        self._has_told = False

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        while text:
            text = self._state(text, pieces)
        return pieces

    def finish(self) -> list[Piece]:
        held, self._held = self._held, ""
        pieces: list[Piece] = []
        if self._state == self._at_start and not self._is_inside:
            pieces += self._answer.push(held)
        elif self._state in (self._at_start, self._inside):
            self._tell(held.strip(), pieces)
        return pieces + self._answer.finish()

    def _at_start(self, text: str, pieces: list[Piece]) -> str:
        seen = self._held + text
        bare = seen.lstrip()
        self._held = ""
        if bare.startswith(BEGIN):
            self._state = self._inside
            return bare[len(BEGIN) :]
        if BEGIN.startswith(bare):
            self._held = seen
            return ""
        self._state = self._inside if self._is_inside else self._behind
        return seen

    def _inside(self, text: str, pieces: list[Piece]) -> str:
        seen = self._held + text
        if not self._has_told:
            seen = seen.lstrip()
        thought, found, rest = seen.partition(END)
        if found:
            self._held = ""
            self._tell(thought.rstrip(), pieces)
            self._state = self._after_end
            return rest
        overlap = next((n for n in range(len(END) - 1, 0, -1) if seen.endswith(END[:n])), 0)
        certain = seen[: len(seen) - overlap].rstrip()
        self._held = seen[len(certain) :]
        self._tell(certain, pieces)
        return ""

    def _after_end(self, text: str, pieces: list[Piece]) -> str:
        bare = text.lstrip()
        if bare:
            self._state = self._behind
        return bare

    def _behind(self, text: str, pieces: list[Piece]) -> str:
        pieces += self._answer.push(text)
        return ""

    def _tell(self, text: str, pieces: list[Piece]) -> None:
        if text:
            self._has_told = True
            pieces.append(Reasoning(text))
