"""litellm against a running Baton: chat, text, streams, tools, schemas and errors. Run by scripts/check_clients.py."""

import asyncio
import json
import os

import litellm

BASE = f"{os.environ['BATON_URL']}/v1"
MODEL = os.environ["BATON_MODEL"]
CHAT = {"model": f"openai/{MODEL}", "api_base": BASE, "api_key": "none", "max_retries": 0, "seed": 1, "temperature": 0}
TEXT = CHAT | {"model": f"text-completion-openai/{MODEL}"}
MESSAGES = [{"role": "user", "content": "Who carries the baton?"}]
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": PLACE}}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE, "strict": True}}


def plain() -> None:
    whole = litellm.completion(messages=MESSAGES, max_tokens=12, n=2, **CHAT)
    assert len(whole.choices) == 2
    assert whole.usage.completion_tokens == 24
    chunks = list(litellm.completion(messages=MESSAGES, max_tokens=12, stream=True, **CHAT))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert litellm.stream_chunk_builder(chunks).choices[0].message.content == text


def logprobs() -> None:
    answer = litellm.completion(messages=MESSAGES, max_tokens=4, logprobs=True, top_logprobs=2, **CHAT)
    assert len(answer.choices[0].logprobs.content) == 4


def text() -> None:
    answer = litellm.text_completion(prompt=["Once upon a time", "The end"], max_tokens=8, **TEXT)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert all(choice.text for choice in answer.choices)


def schema() -> None:
    answer = litellm.completion(messages=MESSAGES, max_tokens=60, response_format=FORMAT, **CHAT)
    assert set(json.loads(answer.choices[0].message.content)) == {"city"}


def tools() -> None:
    asked = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "max_tokens": 80, **CHAT}
    asked["parallel_tool_calls"] = False
    whole = litellm.completion(**asked).choices[0]
    assert whole.finish_reason == "tool_calls"
    built = litellm.stream_chunk_builder(list(litellm.completion(**asked, stream=True))).choices[0]
    names = [[(c.function.name, c.function.arguments) for c in one.message.tool_calls] for one in (whole, built)]
    assert names[0] == names[1]
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in whole.message.tool_calls]
    after = litellm.completion(messages=[*MESSAGES, whole.message.model_dump(), *results], max_tokens=8, **CHAT)
    assert after.choices[0].message.content


def errors() -> None:
    for fields, kind in (
        ({"model": "openai/another"}, litellm.NotFoundError),
        ({"temperature": 3}, litellm.BadRequestError),
        ({"max_tokens": 1_000_000}, litellm.ContextWindowExceededError),
    ):
        try:
            litellm.completion(messages=MESSAGES, **(CHAT | fields))
        except kind:
            continue
        raise AssertionError(f"{fields} was answered")


async def together() -> None:
    answers = await asyncio.gather(*(litellm.acompletion(messages=MESSAGES, max_tokens=6, **CHAT) for _ in range(8)))
    assert len({answer.choices[0].message.content for answer in answers}) == 1


def main() -> None:
    for check in (plain, logprobs, text, schema, tools, errors):
        check()
        print(f"litellm: {check.__name__} passed", flush=True)
    asyncio.run(together())
    print("litellm: together passed")


if __name__ == "__main__":
    main()
