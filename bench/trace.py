"""Mooncake-format traces: JSON Lines of timestamp, lengths and one hash id per block of 512 prompt tokens.

Source: Qin et al., "Mooncake", FAST'25. Prompts are not published; equal hash ids mean equal blocks *and* equal
blocks before them, so contents invented per hash id give the trace's own prefix sharing.
"""

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from ..core.errors import ConfigurationError
from .arrivals import scaled_arrivals
from .workloads import Alphabet, Session, Symbols, Turn, Workload

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


def trace_workload(
    rows: Sequence[TraceRow], alphabet: Alphabet, seed: int, rate: float | None, max_model_len: int | None
) -> Workload:
    """A session of one turn per row, at the row's time; with `rate`, the times are stretched to it.

    Rows longer than `max_model_len` (prompt + output), where it is known, are left out and a note says how many.
    Raises ConfigurationError when no row is left.
    """
    fitting = [row for row in rows if max_model_len is None or row.input_length + row.output_length <= max_model_len]
    if not fitting:
        raise ConfigurationError(
            f"none of the {len(rows)} trace rows fits the server's context of {max_model_len} tokens; "
            "give a trace with shorter requests"
        )
    notes: tuple[str, ...] = ()
    if len(fitting) < len(rows):
        notes = (
            f"{len(rows) - len(fitting)} of {len(rows)} trace rows exceed the context of {max_model_len}: left out",
        )
    sessions: list[Session] = []
    for row in fitting:
        symbols = _row_symbols(row, len(sessions), alphabet, seed)
        sessions.append(Session((Turn(alphabet.render(symbols), row.output_length),)))
    return Workload(sessions, scaled_arrivals([row.timestamp / 1000 for row in fitting], rate), notes)


def _row_symbols(row: TraceRow, index: int, alphabet: Alphabet, seed: int) -> Symbols:
    symbols: Symbols = []
    for hash_id in row.hash_ids:
        symbols += alphabet.draw(random.Random(f"block {seed} {hash_id}"), TRACE_BLOCK_SIZE)
    del symbols[row.input_length :]  # the last block may be partial: a prefix of its content
    missing = row.input_length - len(symbols)
    return symbols + alphabet.draw(random.Random(f"tail {seed} {index}"), missing)


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
