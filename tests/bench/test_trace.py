"""Mooncake-format traces: what is read, what is refused, and that equal hash ids give equal tokens."""

import re
from pathlib import Path

import pytest

from baton.bench.trace import trace_workload
from baton.bench.workloads import Alphabet
from baton.core.errors import ConfigurationError
from baton.core.trace import TraceRow, parse_trace, read_trace

HEAD = Path(__file__).parents[1] / "data" / "mooncake_conversation_head.jsonl"

LITERAL = """\
{"timestamp":1000,"input_length":1100,"output_length":5,"hash_ids":[0,1,2]}
{"timestamp":1000,"input_length":1300,"output_length":6,"hash_ids":[0,1,3]}

{"timestamp":4000,"input_length":512,"output_length":7,"hash_ids":[0]}
{"timestamp":4000,"input_length":600,"output_length":8,"hash_ids":[4,5],"extra":"ignored"}
{"timestamp":5000,"input_length":40,"output_length":9}
{"timestamp":7000,"input_length":1050,"output_length":10,"hash_ids":[0,1]}
""".splitlines()

IDS = Alphabet.of_token_ids(49152)


def contents(rows: list[TraceRow], seed: int = 0) -> list[list[int]]:
    workload = trace_workload(rows, IDS, seed, None, None)
    return [list(session.turns[0].content) for session in workload.sessions]


def test_rows_are_read() -> None:
    rows = parse_trace(LITERAL, 100)
    assert len(rows) == 6
    assert rows[1] == TraceRow(1000, 1300, 6, (0, 1, 3))
    assert rows[4].hash_ids == ()
    assert parse_trace(LITERAL, 2) == rows[:2]


def test_lengths_times_and_outputs_are_the_traces() -> None:
    workload = trace_workload(parse_trace(LITERAL, 100), IDS, 0, None, None)
    turns = [session.turns[0] for session in workload.sessions]
    assert [len(turn.content) for turn in turns] == [1100, 1300, 512, 600, 40, 1050]
    assert [turn.num_output_tokens for turn in turns] == [5, 6, 7, 8, 9, 10]
    assert workload.arrivals_s == [0.0, 0.0, 3.0, 3.0, 4.0, 6.0]
    assert workload.notes == ()


def test_rate_stretches_the_times() -> None:
    workload = trace_workload(parse_trace(LITERAL, 100), IDS, 0, 2.0, None)
    assert workload.arrivals_s == [0.0, 0.0, 1.5, 1.5, 2.0, 3.0]


def test_equal_hash_ids_are_equal_tokens_and_others_differ() -> None:
    a, b, c, d, e, f = contents(parse_trace(LITERAL, 100))
    assert a[:1024] == b[:1024] == f[:1024]
    assert a[1024:1100] != b[1024:1100]
    assert c == a[:512]
    assert d[:40] != a[:40]
    assert e not in (a[:40], d[:40])
    assert f[1024:] not in (a[1024:1050], b[1024:1050])  # no id for the last partial block: it is shared with nobody


def test_contents_depend_on_the_seed_and_on_nothing_else() -> None:
    rows = parse_trace(LITERAL, 100)
    assert contents(rows, seed=3) == contents(rows, seed=3)
    assert contents(rows, seed=3) != contents(rows, seed=4)
    assert contents(rows[2:3])[0] == contents(rows)[2]


def test_rows_over_the_context_are_left_out_and_told() -> None:
    workload = trace_workload(parse_trace(LITERAL, 100), IDS, 0, None, 1105)
    assert [session.turns[0].num_output_tokens for session in workload.sessions] == [5, 7, 8, 9, 10]
    assert workload.notes == ("1 of 6 trace rows exceed the context of 1105: left out",)
    with pytest.raises(ConfigurationError, match="none of the 6 trace rows fits"):
        trace_workload(parse_trace(LITERAL, 100), IDS, 0, None, 10)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "line 2: Input data was truncated"),
        ('{"timestamp":0,"input_length":5}', "line 2: .*output_length"),
        ('{"timestamp":0,"input_length":"5","output_length":1}', "line 2: .*input_length"),
        ('{"timestamp":0,"input_length":0,"output_length":1}', "line 2: .*at least 1"),
        ('{"timestamp":0,"input_length":5,"output_length":0}', "line 2: .*at least 1"),
        ('{"timestamp":0,"input_length":512,"output_length":1,"hash_ids":[1,2]}', "line 2: 2 hash_ids do not fit"),
        ('{"timestamp":0,"input_length":1600,"output_length":1,"hash_ids":[1,2]}', "line 2: 2 hash_ids do not fit"),
        ('{"timestamp":-5,"input_length":5,"output_length":1}', "line 2: timestamp -5 is before"),
    ],
)
def test_a_wrong_line_is_named(line: str, fault: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_trace(['{"timestamp":0,"input_length":5,"output_length":1}', line], 10)
    assert re.search(fault, str(caught.value))


def test_unreadable_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        read_trace(tmp_path / "absent.jsonl", 1)
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(ConfigurationError, match="holds no requests"):
        read_trace(tmp_path / "empty.jsonl", 1)


def test_the_published_trace() -> None:
    rows = read_trace(HEAD, 1000)
    assert len(rows) == 260
    assert rows[0].hash_ids == tuple(range(14))
    first, second = contents(rows[:2])
    assert first[:512] == second[:512]  # both begin with hash id 0
    assert first[512:1024] != second[512:1024]
