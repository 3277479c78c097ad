"""/openapi.json: every path of the gateway; bodies and answers as the structs have them that read and write them."""

from functools import cache
from typing import Any

import msgspec

from ... import __version__
from . import answers, fields

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


@cache
def openapi() -> dict[str, Any]:
    """The document; it is the same object at each call, and not to be changed."""
    schemas = msgspec.json.schema_components(_STRUCTS, ref_template=_REF)[1]
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": __version__},
        "paths": _paths(),
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
            "post": _post("Continue prompts.", fields.CompletionRequest, answers.Completion, is_streamed=True)
        },
        "/v1/chat/completions": {
            "post": _post("Answer messages.", fields.ChatCompletionRequest, answers.ChatCompletion, is_streamed=True)
        },
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
            "post": _operation("Change what a worker does.", _json(_OBJECT), _WITH_BODY, body=_OBJECT),
        },
        "/ledger": {"get": _get("Who owns the blocks of each worker.", _OBJECT)},
        "/flush_cache": {"post": _get("Forget all cached prefixes.", _OBJECT, not_yet=_OBJECT)},
        "/metrics": {"get": _operation("Series for Prometheus.", {"text/plain": {"schema": {"type": "string"}}}, {})},
    }


def _get(summary: str, schema: dict[str, Any], not_yet: dict[str, Any] | None = None) -> dict[str, Any]:
    """`not_yet`: what a 503 answers, which is no error object then."""
    operation = _operation(summary, _json(schema), {})
    if not_yet is not None:
        operation["responses"]["503"] = {"description": "Not, or not completely.", "content": _json(not_yet)}
    return operation


def _post(
    summary: str, body: type[msgspec.Struct], answer: type[msgspec.Struct], *, is_streamed: bool = False
) -> dict[str, Any]:
    content = _json(_ref(answer))
    if is_streamed:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return _operation(summary, content, _WITH_BODY, body=_ref(body))


def _operation(
    summary: str, content: dict[str, Any], errors: dict[int, str], *, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    answer = _json(_ref(answers.ErrorAnswer))
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
