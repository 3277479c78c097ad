"""Tokens as chunks: one each while the client keeps up, together when it does not, in one message a step or in many."""

import asyncio
from typing import Any

import msgspec
import pytest

from baton.core.messages import TokenChunk, TokenChunks
from baton.core.request import FinishReason, SamplingParams
from baton.core.timeline import Timeline
from baton.gateway.changed import Changed
from baton.gateway.choices import Choice
from baton.gateway.deltas import PlainText
from baton.gateway.generation import Generation
from baton.gateway.openai.request import TextRules
from baton.gateway.prompts import Prompt


async def streamed(world: Any, path: str, **body: Any) -> list[dict[str, Any]]:
    async with world.http.post(f"{world.url}{path}", json={"model": "tiny-llama", "stream": True, **body}) as response:
        assert response.status == 200
        events = (await response.read()).decode().split("\n\n")
    data = [event.removeprefix("data: ") for event in events if event.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [msgspec.json.decode(event) for event in data[:-1]]


@pytest.mark.parametrize("chunk_size", [1, 3, 1000])
def test_each_token_is_a_chunk_however_tokens_arrive(in_world, tokenizer, answer, chunk_size):
    async def scenario(world: Any) -> None:
        await world.pair(chunk_size=chunk_size)
        chunks = await streamed(world, "/v1/completions", prompt="a", max_tokens=500)
        told = [chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"][0]["finish_reason"] is None]
        assert len(told) == len(answer)
        assert "".join(told) == tokenizer.decode(answer)

    in_world(scenario)


def test_a_chunk_from_the_template_is_spelled_as_one_from_the_structs(in_world):
    """Token ids are spelled by the structs; without them the rest must be the same."""

    async def scenario(world: Any) -> None:
        await world.pair()
        for path, prompt in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ):
            plain = await streamed(world, path, **prompt)
            with_ids = await streamed(world, path, **prompt, return_token_ids=True)
            for chunk in (*plain, *with_ids):
                del chunk["id"], chunk["created"]
            for chunk in with_ids:
                for choice in chunk["choices"]:
                    choice.pop("token_ids", None)
            assert plain == with_ids

    in_world(scenario)


def test_a_client_that_is_behind_gets_what_is_there_together(tokenizer, answer):
    prompt = Prompt([1], SamplingParams(temperature=0.0, max_tokens=100))
    generation = Generation("key", prompt, "ns", asyncio.Event(), Timeline(), 0.0)
    choice = Choice(0, generation, generation, tokenizer, TextRules(), PlainText())
    generation.output_token_ids += answer[:5]
    one, rest = choice.advance(1), choice.advance()
    assert one is not None
    assert rest is not None
    assert (one.token_ids, rest.token_ids) == (answer[:1], answer[1:5])
    assert choice.advance(1) is None
    generation.output_token_ids += answer[5:7]
    generation.finish(FinishReason.LENGTH)
    ends = [choice.advance(1), choice.advance(1), choice.advance(1)]
    assert [end and end.finish_reason for end in ends] == [None, "length", None]


def test_a_step_in_one_message_loses_no_other_request_to_a_bad_chunk(hand_module, caplog):
    hand = hand_module.HandDriven()
    ref = hand.join(hand_module.decode_info())
    first, second = hand.submit(), hand.submit()
    chunks = [
        TokenChunk(g.attempt.request_id, 0, 0, [5 + i], num_cached_tokens=0) for i, g in enumerate((first, second))
    ]
    first.changed = None  # whatever goes wrong with it
    hand.dispatcher.handle(ref, TokenChunks(chunks))
    assert second.output_token_ids == [6]
    assert "tokens of decode-0 could not be handled" in caplog.text


def test_changed_wakes_times_out_and_uses_one_timer():
    async def scenario() -> None:
        changed = Changed()
        assert not await changed.wait(0.001)
        for _ in range(3):
            asyncio.get_running_loop().call_soon(changed.set)
            assert await changed.wait(60.0)
            changed.clear()
        assert not await changed.wait(0.001)  # sooner than the timer that is left
        changed.set()
        assert await changed.wait(None)
        changed.clear()
        waiting = asyncio.create_task(changed.wait(60.0))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        changed.set()  # nobody waits
        changed.close()

    asyncio.run(scenario())


def test_a_timer_of_an_earlier_wait_does_not_end_a_later_one():
    async def scenario() -> None:
        changed = Changed()
        asyncio.get_running_loop().call_soon(changed.set)
        assert await changed.wait(0.01)
        changed.clear()
        asyncio.get_running_loop().call_later(0.05, changed.set)
        assert await changed.wait(5.0)
        changed.close()

    asyncio.run(scenario())
