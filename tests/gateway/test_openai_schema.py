"""/openapi.json says what is there: every path, every field of the bodies, and answers as they are."""

from typing import Any

import jsonschema
import msgspec
import pytest

from baton import __version__
from baton.gateway.anthropic.fields import CountTokensRequest, MessagesRequest
from baton.gateway.handlers import routes
from baton.gateway.openai import fields
from baton.gateway.openai.examples import EXAMPLES
from baton.gateway.openai.schema import openapi
from baton.gateway.responses.fields import ResponsesRequest

DRAFT = jsonschema.Draft202012Validator
MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
BODIES = {
    "/v1/completions": fields.CompletionRequest,
    "/v1/chat/completions": fields.ChatCompletionRequest,
    "/tokenize": fields.TokenizeRequest,
    "/detokenize": fields.DetokenizeRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
}
# What clients call that Baton answers: field |-> good values. Every field of a body must be named here or be refused.
GOOD: dict[str, list[Any]] = {
    "model": [None, "tiny-llama"],
    "messages": [MESSAGES["messages"]],
    "prompt": ["x", ["x", "y"], [5, 6], [[5], [6]]],
    "tokens": [[5, 6]],
}


def validate(schema: dict[str, Any], value: Any) -> None:
    """Against a schema of the document, whose references start at its root."""
    DRAFT({**schema, "components": openapi()["components"]}).validate(value)


def body_schema(path: str) -> dict[str, Any]:
    content = openapi()["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    return dict(content["schema"])


def answer_schema(method: str, path: str, status: int) -> dict[str, Any]:
    content = openapi()["paths"][path][method.lower()]["responses"][str(status)]["content"]["application/json"]
    return dict(content["schema"])


def test_every_route_is_in_it_and_no_other(in_world: Any) -> None:
    async def scenario(world: Any) -> None:
        served = {(route.method.lower(), route.path.replace(":.+", "")) for route in routes(world.gateway)}
        described = {(method, path) for path, item in openapi()["paths"].items() for method in item}
        assert described - {("parameters", "/v1/models/{model}")} == served
        assert (await world.get("/openapi.json"))[1] == msgspec.json.decode(msgspec.json.encode(openapi()))
        assert (await world.get("/"))[1]["endpoints"] == list(openapi()["paths"])
        assert await world.get("/version") == (200, {"version": __version__})

    in_world(scenario)


def test_all_schemas_are_schemas() -> None:
    for schema in openapi()["components"]["schemas"].values():
        DRAFT.check_schema(schema)
    assert set(openapi()["paths"]["/v1/completions"]["post"]["responses"]) >= {"200", "400", "401", "413", "429", "503"}


@pytest.mark.parametrize("path", BODIES)
def test_every_field_of_a_body_is_in_it(path: str) -> None:
    name = body_schema(path)["$ref"].rpartition("/")[2]
    described = openapi()["components"]["schemas"][name]["properties"]
    assert set(described) == set(BODIES[path].__struct_fields__)


@pytest.mark.parametrize("path", BODIES)
def test_what_the_parser_takes_fits(path: str) -> None:
    names = set(BODIES[path].__struct_fields__) - ({"prompt"} if path == "/v1/responses" else set())  # a template there
    for name, values in GOOD.items():
        if name in names:
            for value in values:
                needed: dict[str, Any] = {"messages": MESSAGES["messages"]} if path.endswith("chat/completions") else {}
                needed |= {"tokens": [5]} if path == "/detokenize" else {}
                needed |= {"input": "x"} if path == "/v1/responses" else {}
                needed |= MESSAGES | {"max_tokens": 1} if path.startswith("/v1/messages") else {}
                needed |= {"prompt": "x"} if path == "/v1/completions" else {}
                is_list = path == "/tokenize" and isinstance(value, list) and name == "prompt"
                if not is_list:
                    validate(body_schema(path), needed | {name: value})
    with pytest.raises(jsonschema.ValidationError):
        validate(body_schema(path), {"model": 5})


def test_what_is_refused_is_told_with_the_values_that_pass() -> None:
    validate(body_schema("/v1/completions"), {"prompt": "x", "suffix": "", "use_beam_search": False, "bad_words": []})
    for wrong in ({"suffix": "y"}, {"use_beam_search": True}, {"tools": [{}]}):
        with pytest.raises(jsonschema.ValidationError):
            validate(body_schema("/v1/completions"), {"prompt": "x"} | wrong)


@pytest.mark.slow  # the process that checks grammars starts
def test_examples_fit_and_can_be_sent_as_they_are(in_world: Any) -> None:
    assert set(EXAMPLES) >= set(BODIES)

    async def scenario(world: Any) -> None:
        await world.pair()
        for path, examples in EXAMPLES.items():
            for name, body in examples.items():
                validate(body_schema(path), body)
                async with world.post(path, body) as response:
                    assert response.status == 200, (path, name, await response.text())

    in_world(scenario)


ASKED: list[tuple[str, dict[str, Any]]] = [
    *(
        ("/v1/completions", {"prompt": "hi", "max_tokens": 3} | more)
        for more in (
            {},
            {"n": 2, "logprobs": 2, "echo": True},
            {"return_token_ids": True, "service_tier": "flex"},
            {"n": 0},
            {"model": "other"},
        )
    ),
    *(
        ("/v1/chat/completions", MESSAGES | {"max_tokens": 3} | more)
        for more in (
            {},
            {"n": 2, "logprobs": True, "top_logprobs": 2},
            {"return_token_ids": True, "service_tier": "auto"},
            {"top_p": 2},
        )
    ),
    ("/tokenize", {"prompt": "hi", "return_token_strs": True}),
    ("/tokenize", MESSAGES),
    ("/tokenize", {}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
    ("/detokenize", {"tokens": [320]}),
]


@pytest.mark.parametrize(("path", "body"), ASKED)
def test_answers_fit(in_world: Any, world_module: Any, path: str, body: dict[str, Any]) -> None:
    async def scenario(world: Any) -> None:
        await world.pair()
        status, answer = await world.answer_to(path, body)
        validate(answer_schema("post", path, status), answer)
        if status == 200 and path.startswith("/v1"):
            chunk_name = "Completion" if path == "/v1/completions" else "ChatCompletionChunk"
            more = {"stream": True, "stream_options": {"include_usage": True}}
            async with world.post(path, body | more) as response:
                chunks = world_module.sse_chunks(await response.read())
            for chunk in chunks:
                validate({"$ref": f"#/components/schemas/{chunk_name}"}, chunk)

    in_world(scenario)


def test_answers_of_operation_fit(in_world: Any) -> None:
    async def scenario(world: Any) -> None:
        await world.pair()
        for path, item in openapi()["paths"].items():
            if "get" not in item or path == "/metrics":
                continue
            status, answer = await world.get(path.replace("{model}", "tiny-llama"))
            validate(answer_schema("get", path, status), answer)

    in_world(scenario)
