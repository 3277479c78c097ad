"""The process that checks grammars: what it refuses, in what time, and that nothing keeps it from answering others."""

import asyncio
import time
from pathlib import Path

import pytest

from baton.core.errors import RequestError
from baton.gateway.grammars import COMPILE_LIMIT_S, Grammars
from baton.vocab.grammar_source import json_schema_grammar, lark_grammar, regex_grammar

FINE = lark_grammar('start: "a"', "grammar")
# llguidance works on this for minutes, inside all of its own limits.
ENDLESS = json_schema_grammar(
    {"allOf": [{"type": "string", "pattern": f"a{{{least},}}b"} for least in range(1, 30)]}, "schema"
)


# Of each kind that makes compilers explode: repetition, references that double or go round, large sets, intersections.
NASTY: dict[str, str] = {
    "multiple of a prime": json_schema_grammar({"type": "integer", "multipleOf": 999_983}, "schema"),
    "multiples of many": json_schema_grammar(
        {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (97, 89, 83, 79, 73, 71)]}, "schema"
    ),
    "product of alternatives": json_schema_grammar(
        {"allOf": [{"oneOf": [{"properties": {f"p{i}": {"const": j}}} for j in range(6)]} for i in range(12)]}, "schema"
    ),
    "itself": json_schema_grammar({"$ref": "#"}, "schema"),
    "a ring": json_schema_grammar(
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "schema"
    ),
    "doubled references": json_schema_grammar(
        {
            "$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
            | {"d40": {"type": "object", "properties": {"a": {"type": "string"}}}},
            "$ref": "#/$defs/d0",
        },
        "schema",
    ),
    "large enum": json_schema_grammar({"enum": [f"value {i * 7919 % 100_003}" for i in range(5000)]}, "schema"),
    "many properties": json_schema_grammar(
        {"properties": {f"p{i}": {"type": "string"} for i in range(2000)}}, "schema"
    ),
    "long text": json_schema_grammar({"type": "string", "minLength": 10**6, "maxLength": 10**7}, "schema"),
    "nested counts": regex_grammar("((((a{1,50}){1,50}){1,50}){1,50})", "regex"),
    "exponential automaton": regex_grammar("[ab]*a[ab]{300}c", "regex"),
    "many alternatives": regex_grammar("|".join(f"x{i}y*z{i}" for i in range(5000)), "regex"),
    "ambiguity": lark_grammar('start: s\ns: s s s | s s | "a" |', "grammar"),
    "trebled rules": lark_grammar(
        "start: a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1} a{i + 1}" for i in range(30)) + '\na30: "x"', "grammar"
    ),
    "doubled terminals": lark_grammar(
        "start: T0\n" + "\n".join(f"T{i}: (T{i + 1} T{i + 1})" for i in range(40)) + '\nT40: "x"', "grammar"
    ),
    "intersections": lark_grammar(
        "start: T\nT: " + " & ".join(f"/(.*[{chr(97 + i)}].*)/" for i in range(20)), "grammar"
    ),
    "counts of counts": lark_grammar('start: a{1,100}\na: b{1,100}\nb: c{1,100}\nc: "x"{1,100}', "grammar"),
}


async def refusal(grammars: Grammars, grammar: str) -> str | None:
    try:
        await grammars.check(grammar, "the_field")
    except RequestError as error:
        return f"{error.status} {error.param} {error}"
    return None


@pytest.mark.slow
def test_grammars_are_checked_in_a_process_of_their_own(tiny_model: Path) -> None:
    async def scenario() -> None:
        grammars = Grammars(str(tiny_model), 320, (2,))
        try:
            grammars.start_soon()
            assert await refusal(grammars, FINE) is None
            assert "unknown name" in (await refusal(grammars, lark_grammar("start: b", "g")) or "")
            started = time.monotonic()
            longest_gap = 0.0
            asking = asyncio.create_task(refusal(grammars, ENDLESS))
            while not asking.done():  # the loop goes on while it compiles
                before = time.monotonic()
                await asyncio.wait([asking], timeout=0.01)
                longest_gap = max(longest_gap, time.monotonic() - before)
            assert (asking.result() or "").startswith("400 the_field the_field cannot be enforced: it is too complex")
            assert time.monotonic() - started < COMPILE_LIMIT_S + 2
            assert longest_gap < 0.5
            started = time.monotonic()
            assert "too complex" in (await refusal(grammars, ENDLESS) or "")  # known by now
            assert time.monotonic() - started < 0.1
            assert await refusal(grammars, FINE + " ") is None
        finally:
            await grammars.close()

    asyncio.run(scenario())


@pytest.mark.slow
def test_whatever_the_grammar_the_answer_comes_in_bounded_time(tiny_model: Path) -> None:
    """Used, or refused in words: and each within what its processor time may be on a machine that is as busy as tests
    make it. The gateway's own loop never waits.
    """

    async def scenario() -> None:
        grammars = Grammars(str(tiny_model), 320, (2,))
        try:
            assert await refusal(grammars, FINE) is None
            for name, grammar in NASTY.items():
                started, spent = time.monotonic(), time.process_time()
                told = await refusal(grammars, grammar)
                assert time.monotonic() - started < 5 * COMPILE_LIMIT_S + 2, name
                assert time.process_time() - spent < 0.5, name
                assert told is None or told.startswith("400 the_field the_field cannot be enforced: "), (name, told)
                assert name not in ("multiple of a prime", "itself", "a ring") or told is not None, name
            assert await refusal(grammars, FINE + " ") is None
        finally:
            await grammars.close()

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_client_that_leaves_spoils_nothing_for_the_next(tiny_model: Path) -> None:
    """SC09: an abort while its grammar compiles."""

    async def scenario() -> None:
        grammars = Grammars(str(tiny_model), 320, (2,))
        try:
            leaving = asyncio.create_task(refusal(grammars, ENDLESS))
            await asyncio.sleep(0)
            leaving.cancel()
            assert await asyncio.gather(*(refusal(grammars, FINE) for _ in range(5))) == [None] * 5
            assert "too complex" in (await refusal(grammars, ENDLESS) or "")
        finally:
            await grammars.close()

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_checker_that_died_is_started_again(tiny_model: Path) -> None:
    async def scenario() -> None:
        grammars = Grammars(str(tiny_model), 320, (2,))
        try:
            assert await refusal(grammars, FINE) is None
            process = grammars._process
            assert process is not None
            process.kill()
            await process.wait()
            assert "no start rule" in (await refusal(grammars, lark_grammar("", "g")) or "")
        finally:
            await grammars.close()

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_model_that_can_have_no_grammars(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")

    async def scenario() -> None:
        grammars = Grammars(str(tmp_path), 320, (2,))
        try:
            for _ in range(2):
                assert "cannot be used for structured output" in (await refusal(grammars, FINE) or "")
        finally:
            await grammars.close()

    asyncio.run(scenario())
