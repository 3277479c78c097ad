"""Mooncake-format traces: JSON Lines of timestamp, lengths and one hash id per block of 512 prompt tokens.

Source: Qin et al., "Mooncake", FAST'25. Prompts are not published; equal hash ids mean equal blocks *and* equal
blocks before them, so contents invented per hash id give the trace's own prefix sharing.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from .errors import ConfigurationError

TRACE_BLOCK_SIZE = 512


class TraceRow(msgspec.Struct, frozen=True):
    """One request of a trace; `timestamp` in milliseconds, lengths in tokens. Other fields are ignored."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def parse_trace(lines: Iterable[bytes | str], limit: int) -> list[TraceRow]:
    """The first `limit` rows; blank lines do not count.

    Raises ConfigurationError naming the line that is not such a row, whose hash ids do not fit its length, or whose
    timestamp is before the line above.
    """
    decoder = msgspec.json.Decoder(TraceRow)
    rows: list[TraceRow] = []
    for number, line in enumerate(lines, 1):
        if len(rows) == limit:
            break
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ConfigurationError(f"trace line {number}: {error}") from error
        fault = _fault(row, rows[-1].timestamp if rows else row.timestamp)
        if fault:
            raise ConfigurationError(f"trace line {number}: {fault}")
        rows.append(row)
    return rows


def _fault(row: TraceRow, previous_timestamp: float) -> str | None:
    num_full = row.input_length // TRACE_BLOCK_SIZE
    if row.input_length < 1 or row.output_length < 1:
        return "input_length and output_length must be at least 1"
    if row.hash_ids and not num_full <= len(row.hash_ids) <= -(-row.input_length // TRACE_BLOCK_SIZE):
        return (
            f"{len(row.hash_ids)} hash_ids do not fit {row.input_length} tokens: "
            f"one is needed per {TRACE_BLOCK_SIZE} tokens, with or without one for the last partial block"
        )
    if row.timestamp < previous_timestamp:
        return f"timestamp {row.timestamp:g} is before the line above; sort the file by timestamp"
    return None


def read_trace(path: Path, limit: int) -> list[TraceRow]:
    """`parse_trace` of a file; raises ConfigurationError when it cannot be read or holds no row."""
    try:
        with path.open("rb") as lines:
            rows = parse_trace(lines, limit)
    except OSError as error:
        raise ConfigurationError(f"the trace {path} cannot be read: {error.strerror}") from error
    if not rows:
        raise ConfigurationError(f"the trace {path} holds no requests")
    return rows


def scaled_arrivals(times_s: Sequence[float], rate: float | None) -> list[float]:
    """Recorded times counted from the first; with `rate`, stretched evenly so that `rate` of them come a second.

    Bursts keep their shape. Times that are all equal stay so: no factor gives them a rate.
    """
    if not times_s:
        return []
    first, last = times_s[0], times_s[-1]
    factor = 1.0
    if rate is not None and last > first:
        factor = len(times_s) / rate / (last - first)
    return [(time - first) * factor for time in times_s]
