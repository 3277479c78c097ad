"""Coverage: which (token, layer) pairs of a prompt are there. Pure; layers with equal tokens are kept as one band."""

from bisect import bisect
from dataclasses import dataclass, field
from typing import NamedTuple


class PieceRange(NamedTuple):
    """Tokens `[start, stop)`, layers `[first_layer, last_layer)`."""

    start: int
    stop: int
    first_layer: int
    last_layer: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def num_layers(self) -> int:
        return self.last_layer - self.first_layer


@dataclass
class _Band:
    """Neighbouring layers that have the same tokens."""

    first_layer: int
    last_layer: int
    spans: list[tuple[int, int]] = field(default_factory=list)  # tokens: disjoint, sorted, neighbours merged

    def add(self, start: int, stop: int) -> None:
        index = bisect(self.spans, (start, stop))
        if index < len(self.spans) and self.spans[index][0] == stop:
            stop = self.spans.pop(index)[1]
        if index > 0 and self.spans[index - 1][1] == start:
            index -= 1
            start = self.spans.pop(index)[0]
        self.spans.insert(index, (start, stop))

    def overlaps(self, start: int, stop: int) -> bool:
        return any(start < there_stop and there_start < stop for there_start, there_stop in self.spans)

    def reach(self, start: int) -> int:
        """The first token from `start` on that is missing."""
        return next((stop for begin, stop in self.spans if begin <= start < stop), start)


class Coverage:
    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self._bands = [_Band(0, num_layers)]  # all layers, in order

    def overlaps(self, piece: PieceRange) -> bool:
        """Is any of the piece there already?"""
        return any(
            band.first_layer < piece.last_layer
            and piece.first_layer < band.last_layer
            and band.overlaps(piece.start, piece.stop)
            for band in self._bands
        )

    def add(self, piece: PieceRange) -> None:
        """The piece, none of which was there, is there now."""
        self._split(piece.first_layer)
        self._split(piece.last_layer)
        for band in self._bands:
            if piece.first_layer <= band.first_layer < piece.last_layer:
                band.add(piece.start, piece.stop)
        merged = self._bands[:1]
        for band in self._bands[1:]:
            if band.spans == merged[-1].spans:
                merged[-1].last_layer = band.last_layer
            else:
                merged.append(band)
        self._bands = merged

    def reach(self, start: int) -> int:
        """The first token from `start` on of which not all layers are there."""
        return min(band.reach(start) for band in self._bands)

    def _split(self, layer: int) -> None:
        """Make a band begin at this layer."""
        for index, band in enumerate(self._bands):
            if band.first_layer < layer < band.last_layer:
                self._bands.insert(index + 1, _Band(layer, band.last_layer, list(band.spans)))
                band.last_layer = layer
                return
