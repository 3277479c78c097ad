"""What a request says its answer must look like, as one grammar. Every way of saying it is enforced, or refused."""

from typing import Any

import msgspec

from ...core.errors import RequestError
from ...vocab.grammar_source import (
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
)
from .fields import CommonFields, ResponseFormat, StructuredOutputs
from .refused import refuse_unsupported

_FORMATS = ("text", "json_object", "json_schema")


def grammar_of(fields: CommonFields) -> tuple[str, str]:
    """(grammar as SamplingParams have it, the field it was made of); both empty when the answer is free.

    Raises RequestError when more than one is given, and for what cannot be enforced.
    """
    found = [
        *_of_format(fields.response_format),
        *_of_outputs(fields.structured_outputs or StructuredOutputs(), "structured_outputs."),
        *_of_outputs(
            StructuredOutputs(fields.guided_json, fields.guided_regex, fields.guided_choice, fields.guided_grammar),
            "guided_",
        ),
        *_of_outputs(StructuredOutputs(regex=fields.regex, grammar=fields.grammar), ""),
    ]
    if not found:
        return "", ""
    if len(found) > 1:
        raise RequestError(f"{found[0][1]} and {found[1][1]} exclude each other; send one", found[1][1])
    if fields.ignore_eos:
        raise RequestError(f"ignore_eos: an answer that {found[0][1]} describes ends when it is complete", "ignore_eos")
    return found[0]


def _of_format(format: ResponseFormat | None) -> list[tuple[str, str]]:
    param = "response_format"
    if format is None or format.type == "text":
        return []
    if format.type not in _FORMATS:
        raise RequestError(f"{param}.type must be one of {', '.join(_FORMATS)}", f"{param}.type")
    if format.type == "json_object":
        return [(json_object_grammar(), param)]
    at = f"{param}.json_schema"
    if format.json_schema is None:
        raise RequestError(f"{at} is missing: send the schema there, as {{'name': ..., 'schema': ...}}", at)
    if format.json_schema.schema is None:
        raise RequestError(f"{at}.schema is missing", f"{at}.schema")
    return [(json_schema_grammar(format.json_schema.schema, f"{at}.schema"), f"{at}.schema")]


def _of_outputs(outputs: StructuredOutputs, at: str) -> list[tuple[str, str]]:
    refuse_unsupported(outputs, at)
    found: list[tuple[str, str]] = []
    if outputs.json is not None:
        found.append((json_schema_grammar(_schema(outputs.json, f"{at}json"), f"{at}json"), f"{at}json"))
    if outputs.regex is not None:
        found.append((regex_grammar(outputs.regex, f"{at}regex"), f"{at}regex"))
    if outputs.choice is not None:
        found.append((choice_grammar(outputs.choice, f"{at}choice"), f"{at}choice"))
    if outputs.grammar is not None:
        found.append((lark_grammar(outputs.grammar, f"{at}grammar"), f"{at}grammar"))
    if outputs.json_object:
        found.append((json_object_grammar(), f"{at}json_object"))
    return found


def _schema(given: dict[str, Any] | bool | str, param: str) -> Any:
    if not isinstance(given, str):
        return given
    try:
        return msgspec.json.decode(given)
    except (msgspec.DecodeError, RecursionError):  # invalid Unicode cannot be in it: the body was decoded
        raise RequestError(f"{param} is no JSON", param) from None
