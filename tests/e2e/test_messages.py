"""/v1/messages by Anthropic's client on a live disaggregated server: the same answers as of chat."""

from typing import Any

import anthropic
import openai
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

QUESTION: Any = [{"role": "user", "content": "Who carries the baton?"}]
SCHEMA = {
    "type": "object",
    "properties": {"runner": {"enum": ["Ann", "Bob"]}, "number": {"type": "integer", "minimum": 1, "maximum": 4}},
    "required": ["runner", "number"],
    "additionalProperties": False,
}


@pytest.fixture
def client(openai_server: Any) -> Any:
    with anthropic.Anthropic(base_url=openai_server.url, api_key="none", max_retries=0) as client:
        yield client


def test_the_answer_is_that_of_chat(
    client: anthropic.Anthropic, openai_client: openai.OpenAI, openai_server: Any
) -> None:
    model = openai_server.model
    chat = openai_client.chat.completions.create(model=model, messages=QUESTION, max_tokens=12, temperature=0)
    asked: Any = {"model": model, "messages": QUESTION, "max_tokens": 12, "extra_body": {"temperature": 0}}
    message = client.messages.create(**asked)
    assert message.content[0].text == chat.choices[0].message.content
    assert message.stop_reason == {"length": "max_tokens", "stop": "end_turn"}[chat.choices[0].finish_reason]
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == chat.usage.prompt_tokens
    assert usage.output_tokens == chat.usage.completion_tokens
    counted = client.messages.count_tokens(model=model, messages=QUESTION)
    assert counted.input_tokens == chat.usage.prompt_tokens
    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == message.content[0].text


def test_a_call_is_made_and_answered(client: anthropic.Anthropic, openai_server: Any) -> None:
    tool: Any = {"name": "get_leg", "description": "A leg of the race", "input_schema": SCHEMA}
    asked: Any = {"model": openai_server.model, "max_tokens": 100, "tools": [tool], "extra_body": {"temperature": 0}}
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    message = client.messages.create(messages=QUESTION, tool_choice=choice, **asked)
    (call,) = message.content
    assert (call.type, call.name, message.stop_reason) == ("tool_use", "get_leg", "tool_use")
    assert call.input["runner"] in ("Ann", "Bob")
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "Ann is tired"}]}
    history: Any = [*QUESTION, {"role": "assistant", "content": [call.model_dump()]}, result]
    after = client.messages.create(messages=history, tool_choice={"type": "none"}, **asked)
    assert after.usage.output_tokens > 0
    openai_server.wait_idle()


def test_errors_are_the_clients_exceptions(client: anthropic.Anthropic, openai_server: Any) -> None:
    with pytest.raises(anthropic.NotFoundError, match=openai_server.model):
        client.messages.create(model="claude", messages=QUESTION, max_tokens=5)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(model=openai_server.model, messages=QUESTION, max_tokens=20_000)
