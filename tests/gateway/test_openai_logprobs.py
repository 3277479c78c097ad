"""Log-probabilities in both shapes, with real bytes, and echo: AP29, AP31, AP39."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.core.messages import GenerateRequest
from baton.core.request import TokenLogprobs
from baton.gateway.deltas import Echo, ScoredToken
from baton.gateway.openai.logprobs import CompletionSpeller, TokenSpeller, chat_logprobs
from baton.vocab.tokenizer import Tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
ANSWER = "Grüße, 世界! Baton runs 🏃 and stops."


def logprob(token_id: int) -> float:
    """As the fake worker has it."""
    return -token_id / 100


def plain_text(raw: bytes) -> str:
    """How a token is spelled, written down once more."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def joined(chunks: list[dict[str, Any]], name: str) -> list[Any]:
    """One list of the completions shape over the chunks of a stream."""
    spelled = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"]]
    return [entry for lists in spelled if lists is not None for entry in lists[name]]


async def streamed(world: Any, world_module: Any, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with world.post(path, body | {"stream": True}) as response:
        chunks: list[dict[str, Any]] = world_module.sse_chunks(await response.read())
        return chunks


@pytest.mark.parametrize("num_top", [0, 1, 20])
@pytest.mark.parametrize("n", [1, 2])
def test_chat(in_world: Any, world_module: Any, tokenizer: Tokenizer, answer: list[int], num_top: int, n: int) -> None:
    async def scenario(world: Any) -> None:
        await world.pair()
        asked = MESSAGES | {"logprobs": True, "top_logprobs": num_top, "n": n}
        _, whole = await world.answer_to(CHAT, asked)
        chunks = await streamed(world, world_module, CHAT, asked)
        for k, choice in enumerate(whole["choices"]):
            tokens = answer[k:]
            entries = choice["logprobs"]["content"]
            assert [entry["logprob"] for entry in entries] == [logprob(i) for i in tokens]
            assert [entry["token"] for entry in entries] == [plain_text(tokenizer.token_bytes(i)) for i in tokens]
            assert b"".join(bytes(entry["bytes"]) for entry in entries) == choice["message"]["content"].encode()
            for entry, token_id in zip(entries, tokens, strict=True):
                expected = [token_id + i for i in range(num_top)]
                assert [top["logprob"] for top in entry["top_logprobs"]] == [logprob(i) for i in expected]
                assert all("\N{REPLACEMENT CHARACTER}" not in top["token"] for top in entry["top_logprobs"])
                for top, other_id in zip(entry["top_logprobs"], expected, strict=True):
                    is_special = tokenizer.is_special(other_id)
                    assert bytes(top["bytes"]) == (b"" if is_special else tokenizer.token_bytes(other_id))
            own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == k]
            told = [entry for c in own if c["logprobs"] for entry in c["logprobs"]["content"]]
            assert told == entries

    in_world(scenario)


def test_nobody_asked(in_world: Any, world_module: Any) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair()
        for path, body in ((COMPLETIONS, {"prompt": "hi"}), (CHAT, MESSAGES | {"logprobs": False, "top_logprobs": 0})):
            _, whole = await world.answer_to(path, body)
            assert whole["choices"][0]["logprobs"] is None
            chunks = await streamed(world, world_module, path, body)
            assert all(choice["logprobs"] is None for chunk in chunks for choice in chunk["choices"])
        assert all(m.request.sampling.num_logprobs is None for m in decode.of(GenerateRequest))

    in_world(scenario)


@pytest.mark.parametrize("num_top", [0, 1, 5])
@pytest.mark.parametrize("stop", [None, "ton r"])
def test_completions(
    in_world: Any, world_module: Any, tokenizer: Tokenizer, answer: list[int], num_top: int, stop: str | None
) -> None:
    async def scenario(world: Any) -> None:
        await world.pair()
        asked = {"prompt": "hi", "logprobs": num_top, "max_tokens": 500, "stop": stop}
        _, whole = await world.answer_to(COMPLETIONS, asked)
        (choice,) = whole["choices"]
        tokens = answer[: whole["usage"]["completion_tokens"]]
        lists = choice["logprobs"]
        texts = [plain_text(tokenizer.token_bytes(i)) for i in tokens]
        assert lists["tokens"] == texts
        assert lists["token_logprobs"] == [logprob(i) for i in tokens]
        for token_id, text, top in zip(tokens, texts, lists["top_logprobs"], strict=True):
            assert top[text] == logprob(token_id) == max(top.values())
            assert len(top) <= max(num_top, 1)
        raw = b"".join(tokenizer.token_bytes(i) for i in tokens if not tokenizer.is_special(i)).decode(errors="replace")
        for text, offset in zip(texts, lists["text_offset"], strict=True):
            if not text.startswith("bytes:") and text != texts[-1]:
                assert raw[offset:].startswith(text)
        chunks = await streamed(world, world_module, COMPLETIONS, asked)
        assert {name: joined(chunks, name) for name in lists} == lists

    in_world(scenario)


@pytest.mark.parametrize("kind", ["text", "ids", "lists"])
@pytest.mark.parametrize("max_tokens", [0, 1, 3])
@pytest.mark.parametrize("n", [1, 2])
def test_echo_with_logprobs(
    in_world: Any, world_module: Any, tokenizer: Tokenizer, answer: list[int], kind: str, max_tokens: int, n: int
) -> None:
    """AP31: prompt tokens first, the first of them without a score; what lm-eval asks for."""

    async def scenario(world: Any) -> None:
        _, decode = await world.pair()
        texts = ["a 世 b"] if kind != "lists" else ["a 世 b", "xyz!"]
        ids = [tokenizer.encode(text) for text in texts]
        prompt = {"text": texts[0], "ids": ids[0], "lists": ids}[kind]
        asked = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": max_tokens, "n": n}
        status, whole = await world.answer_to(COMPLETIONS, asked)
        assert status == 200
        assert len(whole["choices"]) == len(texts) * n
        for index, choice in enumerate(whole["choices"]):
            own, sampled = ids[index // n], answer[index % n :][:max_tokens]
            assert choice["text"] == texts[index // n] + tokenizer.decode(sampled)
            assert choice["finish_reason"] == "length"
            lists = choice["logprobs"]
            assert lists["token_logprobs"] == [None, *(logprob(i) for i in [*own[1:], *sampled])]
            assert lists["top_logprobs"][0] is None
            assert [max(top.values()) for top in lists["top_logprobs"][1:]] == lists["token_logprobs"][1:]
            assert lists["tokens"] == [plain_text(tokenizer.token_bytes(i)) for i in [*own, *sampled]]
            offsets = lists["text_offset"]
            assert offsets[0] == 0
            assert offsets == sorted(offsets)
            if sampled:
                assert offsets[len(own)] == len(texts[index // n])
        assert whole["usage"]["prompt_tokens"] == sum(map(len, ids))
        assert whole["usage"]["completion_tokens"] == len(whole["choices"]) * max_tokens
        requests = [m.request for m in decode.of(GenerateRequest)]
        assert [(r.num_prompt_logprobs, r.sampling.max_tokens) for r in requests] == [(1, max_tokens)] * len(texts)
        chunks = await streamed(world, world_module, COMPLETIONS, asked)
        for index, choice in enumerate(whole["choices"]):
            told = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
            assert "".join(c["text"] for c in told) == choice["text"]
            for name, expected in choice["logprobs"].items():
                assert [entry for c in told if c["logprobs"] for entry in c["logprobs"][name]] == expected

    in_world(scenario)


def test_echo_alone_needs_no_worker(in_world: Any, world_module: Any, tokenizer: Tokenizer) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair()
        asked = {"prompt": ["one", "two <|im_start|>"], "echo": True, "max_tokens": 0, "n": 2}
        status, body = await world.answer_to(COMPLETIONS, asked)
        assert status == 200
        told = [(c["index"], c["text"], c["finish_reason"]) for c in body["choices"]]
        texts = ["one", "one", "two <|im_start|>", "two <|im_start|>"]
        assert told == [(index, text, "length") for index, text in enumerate(texts)]
        assert body["usage"]["completion_tokens"] == 0
        chunks = await streamed(world, world_module, COMPLETIONS, asked)
        assert sorted((c["index"], c["text"]) for chunk in chunks for c in chunk["choices"] if c["text"]) == list(
            enumerate(texts)
        )
        assert decode.of(GenerateRequest) == []
        # With an answer, but no scores, the worker is not asked for any.
        _, body = await world.answer_to(COMPLETIONS, {"prompt": "one", "echo": True, "max_tokens": 2})
        assert body["choices"][0]["text"].startswith("one")
        assert decode.of(GenerateRequest)[0].request.num_prompt_logprobs is None
        assert world.is_empty

    in_world(scenario)


def test_scores_of_the_prompt_may_come_late(in_world: Any, world_module: Any, tokenizer: Tokenizer) -> None:
    """They come with the first choice; another choice may have tokens before it."""

    async def scenario(world: Any) -> None:
        _, decode = await world.pair(auto=False)
        asked = {"prompt": "hi", "echo": True, "logprobs": 0, "max_tokens": 4, "n": 2, "stream": True}
        async with world.post(COMPLETIONS, asked) as response:
            decode.emit(decode.request_id, 2, choice=1)
            decode.emit(decode.request_id, 9, choice=1)
            decode.finish(decode.request_id)
            chunks = world_module.sse_chunks(await response.read())
        for index in (0, 1):
            own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
            assert own[0]["text"].startswith("hi")
            assert own[0]["logprobs"]["token_logprobs"][0] is None

    in_world(scenario, keep_alive_s=0.02)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_any_tokens(tokenizer: Tokenizer, data: Any) -> None:
    """AP29 for any ids: bytes join to the text's, offsets are those of complete characters, pieces do not matter."""
    prompt = data.draw(st.lists(st.integers(0, 319), max_size=6))
    token_ids = data.draw(st.lists(st.integers(0, 319), min_size=1, max_size=12))
    skips = data.draw(st.booleans())
    speller = TokenSpeller(tokenizer, skip_special_tokens=skips)
    scores = [ScoredToken(i, TokenLogprobs(logprob(i), ((319, -1.0), (i, logprob(i))))) for i in token_ids]
    text = tokenizer.decode(token_ids, skip_special_tokens=skips)
    entries = chat_logprobs(speller, scores).content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode(errors="replace") == text
    echo = Echo(tokenizer.decode(prompt, skip_special_tokens=skips), [ScoredToken(i, None) for i in prompt])
    whole = CompletionSpeller(speller).spell(echo, scores)
    cut = data.draw(st.integers(0, len(scores)))
    in_pieces = CompletionSpeller(speller)
    first, second = in_pieces.spell(echo, scores[:cut]), in_pieces.spell(None, scores[cut:])
    for name in whole.__struct_fields__:
        assert getattr(first, name) + getattr(second, name) == getattr(whole, name)
    assert whole.text_offset == sorted(whole.text_offset)
    assert max(whole.text_offset) <= len(echo.text) + len(text)
    assert all(token in top for token, top in zip(whole.tokens, whole.top_logprobs, strict=True) if top is not None)
