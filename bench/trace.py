"""A workload from a recorded trace (core/trace.py): prompts are invented per hash id, lengths and times are real."""

import random
from collections.abc import Sequence

from ..core.errors import ConfigurationError
from ..core.trace import TRACE_BLOCK_SIZE, TraceRow, scaled_arrivals
from .workloads import Alphabet, Session, Symbols, Turn, Workload


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
