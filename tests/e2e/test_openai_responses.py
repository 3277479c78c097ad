"""Responses, files and batches by the official client on a live disaggregated server: the same answers as of chat."""

import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

QUESTION = "Who carries the baton?"
SEEDED: dict[str, Any] = {"extra_body": {"seed": 5}}


class Leg(BaseModel):
    runner: Literal["Ann", "Bob"]
    number: int = Field(ge=1, le=4)


TOOL: Any = {
    "type": "function",
    "name": "get_leg",
    "description": "A leg of the race",
    "parameters": Leg.model_json_schema() | {"additionalProperties": False},
    "strict": True,
}


def test_a_response_is_the_answer_that_chat_gives(openai_client: openai.OpenAI, openai_server: Any) -> None:
    model = openai_server.model
    chat = openai_client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": QUESTION}], max_tokens=12, seed=5
    )
    asked: dict[str, Any] = {"model": model, "input": QUESTION, "max_output_tokens": 12} | SEEDED
    whole = openai_client.responses.create(**asked)
    assert whole.output_text == chat.choices[0].message.content
    assert whole.status == "incomplete"
    assert whole.usage is not None
    assert chat.usage is not None
    assert whole.usage.total_tokens == chat.usage.total_tokens
    with openai_client.responses.stream(**asked) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == whole.output_text
    assert openai_client.responses.retrieve(whole.id).output_text == text
    openai_client.responses.delete(whole.id)
    with pytest.raises(openai.NotFoundError):
        openai_client.responses.retrieve(whole.id)


def test_a_conversation_is_kept(openai_client: openai.OpenAI, openai_server: Any) -> None:
    """The second turn is what chat answers to the whole of it."""
    model = openai_server.model
    first = openai_client.responses.create(model=model, input=QUESTION, max_output_tokens=8, **SEEDED)
    asked: dict[str, Any] = {"model": model, "input": "And then?", "max_output_tokens": 8} | SEEDED
    second = openai_client.responses.create(previous_response_id=first.id, **asked)
    messages: Any = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And then?"},
    ]
    chat = openai_client.chat.completions.create(model=model, messages=messages, max_tokens=8, seed=5)
    assert second.output_text == chat.choices[0].message.content


def test_parsed_text_and_calls(openai_client: openai.OpenAI, openai_server: Any) -> None:
    parsed = openai_client.responses.parse(model=openai_server.model, input=QUESTION, text_format=Leg, **SEEDED)
    assert isinstance(parsed.output_parsed, Leg)
    asked: dict[str, Any] = {"model": openai_server.model, "tools": [TOOL]} | SEEDED
    answer = openai_client.responses.create(input=QUESTION, tool_choice="required", parallel_tool_calls=False, **asked)
    (call,) = [item for item in answer.output if item.type == "function_call"]
    Leg.model_validate_json(call.arguments)
    result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "Ann is tired"}]
    after = openai_client.responses.create(
        input=result, previous_response_id=answer.id, tool_choice="none", max_output_tokens=8, **asked
    )
    assert after.output_text


def test_a_batch_is_answered_as_its_lines_alone(openai_client: openai.OpenAI, openai_server: Any, serving: Any) -> None:
    bodies = [
        {
            "model": openai_server.model,
            "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": 9,
            "seed": seed,
        }
        for seed in range(5)
    ]
    bodies.append(bodies[0] | {"temperature": 9})
    url = "/v1/chat/completions"
    lines = [{"custom_id": str(i), "method": "POST", "url": url, "body": body} for i, body in enumerate(bodies)]
    file = openai_client.files.create(file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
    batch = openai_client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")
    serving.wait_until(lambda: openai_client.batches.retrieve(batch.id).status == "completed", "the batch is done")
    done = openai_client.batches.retrieve(batch.id)
    assert done.output_file_id is not None
    assert done.error_file_id is not None
    outputs = [json.loads(line) for line in openai_client.files.content(done.output_file_id).text.splitlines()]
    texts = {line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"] for line in outputs}
    alone = [openai_client.chat.completions.create(**body).choices[0].message.content for body in bodies[:5]]  # type: ignore[call-overload]
    assert texts == {str(i): text for i, text in enumerate(alone)}
    (wrong,) = [json.loads(line) for line in openai_client.files.content(done.error_file_id).text.splitlines()]
    assert wrong["custom_id"] == "5"
    assert "temperature" in json.dumps(wrong)
