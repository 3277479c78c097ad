"""The process that checks grammars: what it refuses, in what time, and that nothing keeps it from answering others."""

import asyncio
import time
from pathlib import Path

import pytest

from baton.core.errors import RequestError
from baton.gateway.grammars import COMPILE_LIMIT_S, Grammars
from baton.vocab.grammar_source import json_schema_grammar, lark_grammar

FINE = lark_grammar('start: "a"', "grammar")
# llguidance works on this for minutes, inside all of its own limits.
ENDLESS = json_schema_grammar(
    {"allOf": [{"type": "string", "pattern": f"a{{{least},}}b"} for least in range(1, 30)]}, "schema"
)


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
