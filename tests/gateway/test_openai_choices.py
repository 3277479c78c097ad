"""n, best_of and the order of choices: AP14, AP23, AP34, AP37; chunks and usage: AP13, AP15."""

from typing import Any

import pytest

from baton.core.messages import AbortRequest, GenerateRequest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
NEEDED: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hi"},
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
}
ANSWER = "Grüße, 世界! Baton runs 🏃 and stops."


def text_of(choice: dict[str, Any]) -> str:
    """Of a whole choice or of a chunk's."""
    if "text" in choice:
        return str(choice["text"])
    return choice.get("message", choice.get("delta", {})).get("content") or ""


async def streamed(world: Any, world_module: Any, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with world.post(path, body | {"stream": True}) as response:
        assert response.status == 200
        chunks: list[dict[str, Any]] = world_module.sse_chunks(await response.read())
        return chunks


def of_index(chunks: list[dict[str, Any]], index: int) -> list[dict[str, Any]]:
    return [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("max_tokens", [1, 4, 500])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_each_choice_ends_once(
    in_world: Any, world_module: Any, tokenizer: Any, answer: list[int], path: str, max_tokens: int, n: int
) -> None:
    """AP14, AP15: streamed or not, one finish reason for each index, the true one, and the same texts."""

    async def scenario(world: Any) -> None:
        _, decode = await world.pair()
        asked = NEEDED[path] | {"n": n, "max_tokens": max_tokens, "temperature": 0, "seed": 7}
        _, whole = await world.answer_to(path, asked)
        assert [choice["index"] for choice in whole["choices"]] == list(range(n))
        for k, choice in enumerate(whole["choices"]):
            tokens = answer[k:][:max_tokens]
            assert choice["finish_reason"] == ("stop" if tokens[-1:] == answer[-1:] else "length")
            assert text_of(choice) == tokenizer.decode(tokens)
        chunks = await streamed(world, world_module, path, asked | {"stream_options": {"include_usage": True}})
        assert chunks[-1]["usage"] == whole["usage"]
        for choice in whole["choices"]:
            own = of_index(chunks, choice["index"])
            assert "".join(map(text_of, own)) == text_of(choice)
            assert [c["finish_reason"] for c in own if c["finish_reason"]] == [choice["finish_reason"]]
            assert own[-1]["finish_reason"]
            assert text_of(own[-1]) == ""  # the last chunk only ends
            if path == CHAT:
                assert ["role" in c["delta"] for c in own] == [True] + [False] * (len(own) - 1)
        # One request for all choices: one prefill, one transfer.
        assert [m.request.choices for m in decode.of(GenerateRequest)] == [tuple(range(n))] * 2
        assert world.is_empty

    in_world(scenario)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_prompt_counts_once(in_world: Any, answer: list[int], path: str) -> None:
    async def scenario(world: Any) -> None:
        await world.pair(cached_tokens=1)
        _, one = await world.answer_to(path, NEEDED[path])
        _, body = await world.answer_to(path, NEEDED[path] | {"n": 3, "max_tokens": 500})
        usage = body["usage"]
        assert usage["prompt_tokens"] == one["usage"]["prompt_tokens"]
        assert usage["completion_tokens"] == 3 * len(answer) - 3
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 1}
        async with world.http.get(world.url + "/metrics") as response:
            metrics = await response.text()
        assert f"baton_prompt_tokens_total {2 * usage['prompt_tokens']:.1f}" in metrics

    in_world(scenario)


def test_prompts_times_choices_are_numbered_prompt_by_prompt(in_world: Any, world_module: Any, tokenizer: Any) -> None:
    async def scenario(world: Any) -> None:
        await world.pair()
        prompts = [tokenizer.encode(text) for text in ("a", "b", "c")]
        for prompt in (["a", "b", "c"], prompts):
            asked = {"prompt": prompt, "n": 2, "max_tokens": 3, "return_token_ids": True}
            _, whole = await world.answer_to(COMPLETIONS, asked)
            assert [choice["index"] for choice in whole["choices"]] == list(range(6))
            told = [choice["prompt_token_ids"] for choice in whole["choices"]]
            assert told == [ids for ids in prompts for _ in range(2)]
            texts = [text_of(choice) for choice in whole["choices"]]
            assert texts[0] == texts[2] == texts[4] != texts[1] == texts[3] == texts[5]
            chunks = await streamed(world, world_module, COMPLETIONS, asked)
            assert ["".join(map(text_of, of_index(chunks, index))) for index in range(6)] == texts

    in_world(scenario)


def test_every_field_reaches_the_worker(in_world: Any) -> None:
    """AP37: the choices are one request with all of its fields. AP36: ids up to the width of the logits."""

    async def scenario(world: Any) -> None:
        _, decode = await world.pair()
        for path in (COMPLETIONS, CHAT):
            asked: dict[str, Any] = {
                "n": 3,
                "seed": -1,
                "logit_bias": {"319": 5, "0": -100, "2": 100},
                "presence_penalty": 2,
                "frequency_penalty": -2,
                "repetition_penalty": 1.5,
                "temperature": 0.5,
                "top_p": 0.25,
                "top_k": 4,
                "min_p": 0.125,
                "min_tokens": 2,
                "max_tokens": 9,
                "stop_token_ids": [7],
                "logprobs": 3 if path == COMPLETIONS else True,
                "priority": 1,
            }
            asked |= {"top_logprobs": 3} if path == CHAT else {}
            status, _ = await world.answer_to(path, NEEDED[path] | asked)
            assert status == 200
            request = decode.of(GenerateRequest)[-1].request
            sampling = request.sampling
            assert request.choices == (0, 1, 2)
            assert request.urgency.priority == 3
            assert sampling.seed == 2**64 - 1
            assert sampling.logit_bias == ((0, -100.0), (2, 100.0), (319, 5.0))
            assert (sampling.presence_penalty, sampling.frequency_penalty) == (2.0, -2.0)
            assert (sampling.repetition_penalty, sampling.temperature, sampling.top_p) == (1.5, 0.5, 0.25)
            assert (sampling.top_k, sampling.min_p, sampling.min_tokens, sampling.max_tokens) == (4, 0.125, 2, 9)
            assert sampling.stop_token_ids == (2, 7)
            assert sampling.num_logprobs == 3
            assert (await world.answer_to(path, NEEDED[path] | {"ignore_eos": True, "max_tokens": 3}))[0] == 200
            assert decode.of(GenerateRequest)[-1].request.sampling.stop_token_ids == ()

    in_world(scenario)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stop_string_ends_its_own_choice_only(in_world: Any, world_module: Any, path: str) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair(auto=False)
        asked = NEEDED[path] | {"n": 2, "stop": ANSWER[:1], "max_tokens": 500}
        async with world.post(path, asked | {"stream": True}) as response:
            decode.emit(decode.request_id, 4)
            await world_module.until(lambda: decode.of(AbortRequest))
            (abort,) = decode.of(AbortRequest)
            assert abort.choice == 0  # choice 1 begins behind it
            decode.finish(decode.request_id)
            chunks = world_module.sse_chunks(await response.read())
        assert [c["finish_reason"] for c in of_index(chunks, 0) if c["finish_reason"]] == ["stop"]
        assert "".join(map(text_of, of_index(chunks, 0))) == ""
        assert "".join(map(text_of, of_index(chunks, 1))) == ANSWER[1:]
        assert world.is_empty

    in_world(scenario, keep_alive_s=0.02)


def test_the_likeliest_answers_are_told(in_world: Any, tokenizer: Any, answer: list[int]) -> None:
    """best_of: of 5 samples the 2 of the highest mean log-probability; all tokens are counted."""

    async def scenario(world: Any) -> None:
        _, decode = await world.pair()
        num_tokens = 6
        samples = [answer[k : k + num_tokens] for k in range(5)]
        expected = sorted(samples, key=sum)[:2]  # token n has log-probability -n/100
        asked = {"prompt": ["a", "b"], "n": 2, "best_of": 5, "max_tokens": num_tokens, "return_token_ids": True}
        status, body = await world.answer_to(COMPLETIONS, asked)
        assert status == 200
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
        assert [choice["token_ids"] for choice in body["choices"]] == expected * 2
        assert all(choice["logprobs"] is None for choice in body["choices"])
        assert body["usage"]["completion_tokens"] == 2 * 5 * num_tokens
        assert decode.of(GenerateRequest)[0].request.choices == (0, 1, 2, 3, 4)
        status, body = await world.answer_to(COMPLETIONS, asked | {"logprobs": 1, "prompt": "a"})
        assert all(len(choice["logprobs"]["tokens"]) == num_tokens for choice in body["choices"])

    in_world(scenario)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_usage_comes_when_it_is_asked_for(in_world: Any, world_module: Any, path: str) -> None:
    """AP13, and counts so far with every chunk."""

    async def scenario(world: Any) -> None:
        await world.pair()
        asked = NEEDED[path] | {"n": 2}
        _, whole = await world.answer_to(path, asked)
        for options in ({}, {"include_usage": False}, {"include_usage": None}):
            chunks = await streamed(world, world_module, path, asked | {"stream_options": options})
            assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)
        chunks = await streamed(world, world_module, path, asked | {"stream_options": {"include_usage": True}})
        assert [chunk["choices"] for chunk in chunks if chunk["usage"] is not None] == [[]]
        assert chunks[-1]["usage"] == whole["usage"]

    in_world(scenario)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("include", [False, True])
def test_counts_so_far_with_every_chunk(
    in_world: Any, world_module: Any, answer: list[int], path: str, include: bool
) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair(auto=False)
        options = {"include_usage": include, "continuous_usage_stats": True}
        async with world.post(path, NEEDED[path] | {"stream": True, "stream_options": options, "max_tokens": 9}) as (
            response
        ):
            raw = b""
            for num_tokens in (2, 5, 9):
                decode.emit(decode.request_id, num_tokens - decode.sent.get((decode.request_id, 0), 0))
                while b'"completion_tokens":%d' % num_tokens not in raw:
                    assert not response.content.at_eof(), raw
                    raw += await response.content.readany()
            raw += await response.read()
        chunks = world_module.sse_chunks(raw)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]  # that of the role too
        assert sorted(set(counts)) == [2, 5, 9]
        assert counts == sorted(counts)
        assert (chunks[-1]["choices"] == []) is include

    in_world(scenario, keep_alive_s=0.02)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("include", [False, True])
def test_what_ended_the_text(
    in_world: Any, world_module: Any, tokenizer: Any, answer: list[int], path: str, include: bool
) -> None:
    """include_stop_str_in_output: stop strings, stop tokens; streamed and not."""

    async def scenario(world: Any) -> None:
        await world.pair()
        stop_token = answer[10]
        before = tokenizer.decode(answer[: answer.index(stop_token)])
        behind = tokenizer.decode(answer[: answer.index(stop_token) + 1])
        for more, short, long in (
            ({"stop": ["ton r"]}, ANSWER[: ANSWER.index("ton r")], ANSWER[: ANSWER.index("ton r") + 5]),
            ({"stop_token_ids": [stop_token]}, before, behind),
        ):
            asked = NEEDED[path] | more | {"include_stop_str_in_output": include, "max_tokens": 500}
            _, whole = await world.answer_to(path, asked)
            assert text_of(whole["choices"][0]) == (long if include else short)
            assert whole["choices"][0]["finish_reason"] == "stop"
            chunks = await streamed(world, world_module, path, asked)
            assert "".join(map(text_of, of_index(chunks, 0))) == (long if include else short)

    in_world(scenario)


def test_stop_strings_do_not_count_before_min_tokens(in_world: Any, tokenizer: Any, answer: list[int]) -> None:
    async def scenario(world: Any) -> None:
        await world.pair()
        letter = next(c for c in "abcdefghijklmnopqrstuvwxyz" if ANSWER.count(c) > 1)
        first = ANSWER.index(letter)
        second = ANSWER.index(letter, first + 1)
        num_before = next(n for n in range(len(answer)) if len(tokenizer.decode(answer[:n])) > first)
        for min_tokens, end in ((0, first), (num_before, second)):
            asked = {"prompt": "hi", "stop": letter, "min_tokens": min_tokens, "max_tokens": 500}
            _, body = await world.answer_to(COMPLETIONS, asked)
            assert text_of(body["choices"][0]) == ANSWER[:end]

    in_world(scenario)


def test_special_tokens_are_shown_on_request(in_world: Any, tokenizer: Any, answer: list[int]) -> None:
    async def scenario(world: Any) -> None:
        special = next(i for i in range(tokenizer.vocab_size) if tokenizer.is_special(i) and i != answer[-1])
        name = tokenizer.token_bytes(special).decode()
        await world.pair(answer=[answer[0], special, answer[1]])
        for skip in (True, False):
            asked = {"prompt": "hi", "max_tokens": 3, "skip_special_tokens": skip, "ignore_eos": True}
            _, body = await world.answer_to(COMPLETIONS, asked)
            assert (name in text_of(body["choices"][0])) is not skip

    in_world(scenario)
