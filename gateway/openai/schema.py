"""/openapi.json: every path of the gateway; bodies and answers as the structs have them that read and write them."""

from functools import cache
from typing import Any

import msgspec

from ... import __version__
from ..anthropic import answers as anthropic
from ..anthropic import fields as anthropic_fields
from ..batches import objects as batches
from ..paging import MOST_BATCHES, MOST_FILES, MOST_ITEMS
from ..responses import answers as responses
from ..responses import fields as responses_fields
from ..role_handlers import RolesBody
from . import answers, fields
from .examples import EXAMPLES
from .refused import passing_values

_REF = "#/components/schemas/{name}"
_STRUCTS: tuple[type[msgspec.Struct], ...] = (
    fields.CompletionRequest,
    fields.ChatCompletionRequest,
    fields.TokenizeRequest,
    fields.DetokenizeRequest,
    answers.Completion,
    answers.ChatCompletion,
    answers.ChatCompletionChunk,
    answers.Model,
    answers.ModelList,
    answers.Tokenized,
    answers.Detokenized,
    answers.Version,
    answers.ErrorAnswer,
    responses_fields.ResponsesRequest,
    responses.ResponseObject,
    responses.ResponseEvent,
    responses.CountedInput,
    responses.DeletedResponse,
    responses.InputItemList,
    anthropic_fields.MessagesRequest,
    anthropic_fields.CountTokensRequest,
    anthropic.Message,
    anthropic.StreamEvent,
    anthropic.CountedTokens,
    anthropic.AnthropicErrorAnswer,
    batches.FileObject,
    batches.FileList,
    batches.FileDeleted,
    batches.BatchRequest,
    batches.Batch,
    batches.BatchList,
    RolesBody,
)
# What any path may answer, and what those with a body may answer besides.
_ANYWHERE = {
    401: "No API key, or an unknown one.",
    404: "There is no such path, or the model is not served here.",
    405: "The path takes another method.",
    500: "The server failed.",
    503: "No worker can serve it now; see Retry-After.",
}
_WITH_BODY = {
    400: "The request is wrong; `param` names the field.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    429: "Too many requests wait; see Retry-After.",
}
_OBJECT = {"type": "object"}
_ENDED_BY_DONE = (answers.Completion, answers.ChatCompletionChunk)
_UPLOAD = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["purpose", "file"],
                "properties": {
                    "purpose": {"enum": ["batch"]},
                    "file": {"type": "string", "contentMediaType": "application/octet-stream"},
                    "expires_after[anchor]": {"enum": ["created_at"]},
                    "expires_after[seconds]": {
                        "type": "integer",
                        "minimum": batches.MIN_EXPIRY_S,
                        "maximum": batches.MAX_EXPIRY_S,
                    },
                },
                "additionalProperties": False,
                "dependentRequired": {
                    "expires_after[anchor]": ["expires_after[seconds]"],
                    "expires_after[seconds]": ["expires_after[anchor]"],
                },
            }
        }
    },
}


@cache
def openapi() -> dict[str, Any]:
    """The document; it is the same object at each call, and not to be changed."""
    schemas = msgspec.json.schema_components(_STRUCTS, ref_template=_REF)[1]
    for schema in schemas.values():
        for name, field in schema.get("properties", {}).items():
            if field.get("description") == fields.REFUSED:
                field["enum"] = passing_values(name)
    paths = _paths()
    for path, examples in EXAMPLES.items():
        content = paths[path]["post"]["requestBody"]["content"]["application/json"]
        content["examples"] = {name: {"value": body} for name, body in examples.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _paths() -> dict[str, Any]:
    model = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    return {
        "/": {"get": _get("What there is.", _OBJECT)},
        "/v1/models": {"get": _get("The served model.", _ref(answers.ModelList))},
        "/v1/models/{model}": {"get": _get("One model.", _ref(answers.Model)) | {"parameters": model}},
        "/v1/completions": {
            "post": _post("Continue prompts.", fields.CompletionRequest, answers.Completion, event=answers.Completion)
        },
        "/v1/chat/completions": {
            "post": _post(
                "Answer messages.",
                fields.ChatCompletionRequest,
                answers.ChatCompletion,
                event=answers.ChatCompletionChunk,
            )
        },
        **_responses_paths(),
        **_messages_paths(),
        **_batch_paths(),
        "/tokenize": {"post": _post("The tokens of a prompt.", fields.TokenizeRequest, answers.Tokenized)},
        "/detokenize": {"post": _post("The text of tokens.", fields.DetokenizeRequest, answers.Detokenized)},
        "/version": {"get": _get("Baton's version.", _ref(answers.Version))},
        "/openapi.json": {"get": _get("This document.", _OBJECT)},
        "/health": {"get": _get("The gateway is alive.", _OBJECT)},
        "/ready": {"get": _get("Requests can be served.", _OBJECT, not_yet=_OBJECT)},
        "/workers": {"get": _get("Who is here.", _OBJECT)},
        "/tuner": {"get": _get("What workers have learned.", _OBJECT)},
        "/roles": {
            "get": _get("What each worker does.", _OBJECT),
            "post": _operation(
                "Change what a worker does.",
                _json(_OBJECT),
                _WITH_BODY | {409: "No decode worker would be left."},
                body=_ref(RolesBody),
            ),
        },
        "/ledger": {"get": _get("Who owns the blocks of each worker.", _OBJECT)},
        "/flush_cache": {"post": _get("Forget all cached prefixes.", _OBJECT, not_yet=_OBJECT)},
        "/metrics": {"get": _operation("Series for Prometheus.", {"text/plain": {"schema": {"type": "string"}}}, {})},
    }


def _responses_paths() -> dict[str, Any]:
    body, answer = responses_fields.ResponsesRequest, responses.ResponseObject
    by_id = {"parameters": [_in_path("response_id")]}
    wrong = {400: "The request is wrong; `param` names the field."}
    stored = _operation("A stored answer.", _json(_ref(answer)), wrong)
    return {
        "/v1/responses": {"post": _post("Answer, and keep the answer.", body, answer, event=responses.ResponseEvent)},
        "/v1/responses/input_tokens": {"post": _post("Its tokens.", body, responses.CountedInput)},
        "/v1/responses/{response_id}": {
            "get": stored | {"parameters": [*by_id["parameters"], _in_query("stream", {"enum": ["false"]})]},
            "delete": _get("Forget an answer.", _ref(responses.DeletedResponse)) | by_id,
        },
        "/v1/responses/{response_id}/input_items": {
            "get": _operation("What it answered.", _json(_ref(responses.InputItemList)), wrong)
            | {"parameters": [*by_id["parameters"], *_page(MOST_ITEMS)]},
        },
    }


def _messages_paths() -> dict[str, Any]:
    error = anthropic.AnthropicErrorAnswer
    return {
        anthropic.MESSAGES_PATH: {
            "post": _post(
                "Answer, as Anthropic's API does.",
                anthropic_fields.MessagesRequest,
                anthropic.Message,
                event=anthropic.StreamEvent,
                error=error,
            )
        },
        f"{anthropic.MESSAGES_PATH}/count_tokens": {
            "post": _post("Its tokens.", anthropic_fields.CountTokensRequest, anthropic.CountedTokens, error=error)
        },
    }


def _batch_paths() -> dict[str, Any]:
    listing = {400: "The page is wrong; `param` names the field."}
    files = _operation("Your files.", _json(_ref(batches.FileList)), listing)
    found = _operation("Your batches.", _json(_ref(batches.BatchList)), listing)
    bytes_ = {"application/octet-stream": {"schema": {"type": "string"}}}
    cancel = _operation("Cancel a batch.", _json(_ref(batches.Batch)), {409: "It is over."})
    return {
        "/v1/files": {
            "post": _operation("Keep a file.", _json(_ref(batches.FileObject)), _WITH_BODY) | {"requestBody": _UPLOAD},
            "get": files | {"parameters": [*_page(MOST_FILES), _in_query("purpose", {"type": "string"})]},
        },
        "/v1/files/{file_id}": {
            "get": _get("One file.", _ref(batches.FileObject)) | {"parameters": [_in_path("file_id")]},
            "delete": _get("Delete a file.", _ref(batches.FileDeleted)) | {"parameters": [_in_path("file_id")]},
        },
        "/v1/files/{file_id}/content": {
            "get": _operation("Its bytes.", bytes_, {}) | {"parameters": [_in_path("file_id")]}
        },
        "/v1/batches": {
            "post": _post("Run the lines of a file.", batches.BatchRequest, batches.Batch),
            "get": found | {"parameters": _page(MOST_BATCHES)},
        },
        "/v1/batches/{batch_id}": {
            "get": _get("One batch.", _ref(batches.Batch)) | {"parameters": [_in_path("batch_id")]}
        },
        "/v1/batches/{batch_id}/cancel": {"post": cancel | {"parameters": [_in_path("batch_id")]}},
    }


def _page(most: int) -> list[dict[str, Any]]:
    return [
        _in_query("limit", {"type": "integer", "minimum": 1, "maximum": most}),
        _in_query("after", {"type": "string"}),
        _in_query("order", {"enum": ["asc", "desc"]}),
    ]


def _in_path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _in_query(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": schema}


def _get(summary: str, schema: dict[str, Any], not_yet: dict[str, Any] | None = None) -> dict[str, Any]:
    """`not_yet`: what a 503 answers, which is no error object then."""
    operation = _operation(summary, _json(schema), {})
    if not_yet is not None:
        operation["responses"]["503"] = {"description": "Not, or not completely.", "content": _json(not_yet)}
    return operation


def _post(
    summary: str,
    body: type[msgspec.Struct],
    answer: type[msgspec.Struct],
    *,
    event: type[msgspec.Struct] | None = None,
    error: type[msgspec.Struct] = answers.ErrorAnswer,
) -> dict[str, Any]:
    content = _json(_ref(answer))
    if event is not None:
        content["text/event-stream"] = {"schema": _event(event, error)}
    return _operation(summary, content, _WITH_BODY, body=_ref(body), error=error)


def _event(data: type[msgspec.Struct], error: type[msgspec.Struct]) -> dict[str, Any]:
    """One event of a stream, as an object: OpenAPI 3.1 has no other way to describe it."""
    content = {"anyOf": [_ref(data), _ref(error)]}
    told: dict[str, Any] = {"type": "string", "contentMediaType": "application/json", "contentSchema": content}
    if data in _ENDED_BY_DONE:
        told = {"anyOf": [{"const": "[DONE]"}, told]}
    return {
        "description": "Each event of the stream.",
        "type": "object",
        "properties": {"event": {"type": "string"}, "data": told},
        "required": ["data"],
    }


def _operation(
    summary: str,
    content: dict[str, Any],
    errors: dict[int, str],
    *,
    body: dict[str, Any] | None = None,
    error: type[msgspec.Struct] = answers.ErrorAnswer,
) -> dict[str, Any]:
    answer = _json(_ref(error))
    responses: dict[str, Any] = {"200": {"description": "Done.", "content": content}}
    for status, text in sorted((_ANYWHERE | errors).items()):
        responses[str(status)] = {"description": text, "content": answer}
    operation: dict[str, Any] = {"summary": summary, "responses": responses}
    if body is not None:
        operation["requestBody"] = {"required": True, "content": _json(body)}
    return operation


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _ref(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return {"$ref": _REF.format(name=struct.__name__)}
