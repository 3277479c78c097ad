"""/openapi.json: every path of the gateway; bodies and answers as the structs have them that read and write them."""

from functools import cache
from typing import Any

import msgspec

from ... import __version__
from ..batches import objects as batches
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
    batches.FileObject,
    batches.FileList,
    batches.FileDeleted,
    batches.BatchRequest,
    batches.Batch,
    batches.BatchList,
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
                },
            }
        }
    },
}


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
            "post": _operation("Change what a worker does.", _json(_OBJECT), _WITH_BODY, body=_OBJECT),
        },
        "/ledger": {"get": _get("Who owns the blocks of each worker.", _OBJECT)},
        "/flush_cache": {"post": _get("Forget all cached prefixes.", _OBJECT, not_yet=_OBJECT)},
        "/metrics": {"get": _operation("Series for Prometheus.", {"text/plain": {"schema": {"type": "string"}}}, {})},
    }


def _batch_paths() -> dict[str, Any]:
    page = [_in_query("limit", {"type": "integer", "minimum": 1}), _in_query("after", {"type": "string"})]
    listing = {400: "The page is wrong; `param` names the field."}
    order = _in_query("order", {"enum": ["asc", "desc"]})
    files = _operation("Your files.", _json(_ref(batches.FileList)), listing)
    found = _operation("Your batches.", _json(_ref(batches.BatchList)), listing)
    bytes_ = {"application/octet-stream": {"schema": {"type": "string"}}}
    cancel = _operation("Cancel a batch.", _json(_ref(batches.Batch)), {409: "It is over."})
    return {
        "/v1/files": {
            "post": _operation("Keep a file.", _json(_ref(batches.FileObject)), _WITH_BODY) | {"requestBody": _UPLOAD},
            "get": files | {"parameters": [*page, order, _in_query("purpose", {"type": "string"})]},
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
            "get": found | {"parameters": [*page, order]},
        },
        "/v1/batches/{batch_id}": {
            "get": _get("One batch.", _ref(batches.Batch)) | {"parameters": [_in_path("batch_id")]}
        },
        "/v1/batches/{batch_id}/cancel": {"post": cancel | {"parameters": [_in_path("batch_id")]}},
    }


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
