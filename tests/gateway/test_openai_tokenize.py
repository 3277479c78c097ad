"""/tokenize and /detokenize, in vLLM's shapes."""

import json
import shutil
from typing import Any

import pytest

from baton.core.messages import GenerateRequest
from baton.vocab.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "hi 世"}]


async def refused(world: Any, path: str, body: Any) -> tuple[int, Any]:
    status, answer = await world.answer_to(path, body)
    return status, answer["error"]["param"]


def test_texts(in_world: Any, tokenizer: Tokenizer) -> None:
    async def scenario(world: Any) -> None:
        await world.pair()
        for text in ("Grüße, 世界 <|im_start|> 🏃", "", "a\x00b"):
            token_ids = tokenizer.encode(text, add_special_tokens=True)
            status, body = await world.answer_to("/tokenize", {"prompt": text, "model": "tiny-llama"})
            assert status == 200
            expected = {"count": len(token_ids), "max_model_len": 1024, "tokens": token_ids, "token_strs": None}
            assert body == expected
            assert await world.answer_to("/detokenize", {"tokens": token_ids}) == (200, {"prompt": text})
            _, body = await world.answer_to("/tokenize", {"prompt": text, "add_special_tokens": False})
            assert body["tokens"] == tokenizer.encode(text)
        _, body = await world.answer_to("/tokenize", {"prompt": "a世", "return_token_strs": True})
        assert len(body["token_strs"]) == body["count"]
        assert "\N{REPLACEMENT CHARACTER}" not in "".join(body["token_strs"])

    in_world(scenario)


def test_messages_are_those_of_chat(in_world: Any) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair()
        for more in (
            {},
            {"add_generation_prompt": False},
            {"continue_final_message": True},
            {"add_special_tokens": True},
            {"chat_template_kwargs": {"a": 1}},
        ):
            _, body = await world.answer_to("/tokenize", {"messages": MESSAGES} | more)
            status, _ = await world.answer_to("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1} | more)
            assert status == 200
            assert decode.of(GenerateRequest)[-1].request.prompt_token_ids == body["tokens"]

    in_world(scenario)


def test_continuing_the_last_message(in_world: Any, tokenizer: Tokenizer) -> None:
    async def scenario(world: Any) -> None:
        await world.pair()

        async def prompt_of(messages: list[Any], **more: Any) -> str:
            _, body = await world.answer_to("/tokenize", {"messages": messages} | more)
            _, text = await world.answer_to("/detokenize", {"tokens": body["tokens"]})
            return str(text["prompt"])

        for content in ("The answer is ", "hi 世", "<|im_end|>", "  two\n\n"):
            messages = [*MESSAGES, {"role": "assistant", "content": content}]
            text = await prompt_of(messages, continue_final_message=True)
            assert text.endswith(content)
            assert text.startswith(await prompt_of(MESSAGES))
            closed = await prompt_of(messages, add_generation_prompt=False)
            assert closed.startswith(text)
            assert len(closed) > len(text)
            assert len(await prompt_of(messages)) > len(closed)

    in_world(scenario)


def test_bad_bodies(in_world: Any) -> None:
    async def scenario(world: Any) -> None:
        await world.pair()
        for path, body, param in (
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": ["a"]}, "prompt"),
            ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
            ("/tokenize", {"messages": []}, "messages"),
            ("/tokenize", {"messages": [{"role": "alien", "content": ""}]}, "messages[0].role"),
            ("/tokenize", {"prompt": "a", "chat_template": "x"}, "chat_template"),
            ("/tokenize", {"prompt": "x" * 300_000}, "prompt"),
            ("/detokenize", {}, "tokens"),
            ("/detokenize", {"tokens": "a"}, "tokens"),
            ("/detokenize", {"tokens": [-1]}, "tokens"),
            ("/detokenize", {"tokens": [320]}, "tokens"),
            ("/detokenize", {"tokens": [1.5]}, "tokens"),
            ("/detokenize", {"tokens": [2**63]}, "tokens"),
        ):
            assert await refused(world, path, body) == (400, param)
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
            assert await refused(world, path, body | {"model": "other"}) == (404, "model")
            async with world.http.post(world.url + path, data=b"[]") as response:
                assert response.status == 400

    in_world(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_templates_get_tools_names_and_variables(
    in_world: Any, tiny_model: Any, tmp_path: Any, tokenizer: Tokenizer, stream: bool
) -> None:
    """Messages with calls, and answers of tools, as templates know them: arguments are objects, content is a text."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    # It knows of tools and of calls, so nothing is written out as text for it.
    config["chat_template"] = "{{ messages | tojson }} {{ style }} {{ add_generation_prompt }}{% if tools %}{% endif %}"
    config["chat_template"] += "{{ messages[0].tool_calls }}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, "x"]}'}}

    async def scenario(world: Any) -> None:
        _, decode = await world.pair()
        body = {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                    "name": "u",
                },
                {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
                {"role": "tool", "content": "42", "tool_call_id": "c1"},
                {"role": "assistant", "tool_calls": [{"function": {"name": "g"}}], "content": "so"},
            ],
            "chat_template_kwargs": {"style": {"terse": True}},
            "stream": stream,
            "max_tokens": 1,
        }
        async with world.post("/v1/chat/completions", body) as response:
            assert response.status == 200
            await response.read()
        text = tokenizer.decode(decode.of(GenerateRequest)[-1].request.prompt_token_ids)
        told, _, rest = text.rpartition("] ")
        assert json.loads(told + "]") == [
            {"role": "user", "content": "a\nb", "name": "u"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"type": "function", "function": {"name": "f", "arguments": {"a": [1, "x"]}}, "id": "c1"}
                ],
            },
            {"role": "tool", "content": "42", "tool_call_id": "c1"},
            {
                "role": "assistant",
                "content": "so",
                "tool_calls": [{"type": "function", "function": {"name": "g", "arguments": {}}}],
            },
        ]
        assert rest == "{'terse': True} True"

    in_world(scenario, model_folder=str(folder))
