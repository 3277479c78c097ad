"""What an answer must look like, as one string: the grammar that SamplingParams carry. Pure.

A string holds llguidance's serialised form. Here only its size and what llguidance would silently accept are checked;
whether it compiles is for a GrammarCompiler to say. What cannot be enforced is refused, never ignored.
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import llguidance
import msgspec

from ..core.errors import RequestError

MAX_GRAMMAR_BYTES = 128 * 1024
MAX_CHOICES = 1024

# Between the parts of JSON: nothing, one space, or a line break with its indentation. All that is usual, and bounded,
# because small models like to go on with blank lines for ever.
_LAYOUT = {"whitespace_pattern": r" |\n {0,64}"}

# As GBNF and EBNF write rules. Within one line only: were line breaks taken, blank lines would cost their square.
_OTHER_RULE = re.compile(r"^[ \t]*<?[\w-]+>?[ \t]*::=", re.MULTILINE)

# Keywords of old drafts that llguidance takes for the user's own and would not enforce.
_OLD_KEYWORDS = ("disallow", "divisibleBy", "extends")
_SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMAS = ("items", "additionalProperties", "additionalItems", "not")


def json_object_grammar() -> str:
    """Any JSON object."""
    return json_schema_grammar({"type": "object"}, "response_format")


def json_schema_grammar(schema: Any, param: str) -> str:
    """JSON that satisfies `schema` (draft 2020-12; properties come in the schema's order).

    Raises RequestError with `param` for what is no schema, is too large, or cannot be enforced.
    """
    _serialised(schema, param)  # what is too large is not looked through
    return _serialised({"json_schema": checked_schema(schema, param)}, param)


def regex_grammar(pattern: str, param: str) -> str:
    """A text that a regular expression matches as a whole (Rust's syntax: no look-around, no back references)."""
    _serialised(pattern, param)  # what is too large is not worked on
    return lark_grammar(f"start: /{_escape_slashes(pattern)}/", param)


def choice_grammar(choices: Sequence[str], param: str) -> str:
    """One of the texts."""
    if not choices or len(choices) > MAX_CHOICES or "" in choices:
        raise RequestError(f"{param} must hold 1 to {MAX_CHOICES} texts, none of them empty", param)
    return lark_grammar("start: " + " | ".join(map(literal, dict.fromkeys(choices))), param)


def lark_grammar(text: str, param: str) -> str:
    """A text of a Lark grammar in llguidance's dialect; its rule `start` is the whole."""
    grammar = _serialised({"lark_grammar": text}, param)
    if _OTHER_RULE.search(text):
        raise RequestError(f"{param}: this looks like GBNF or EBNF; write the grammar in Lark's syntax", param)
    return grammar


def literal(text: str) -> str:
    """A text inside a Lark grammar, which wants control characters escaped that JSON does not mind."""
    return json.dumps(text).replace("\x7f", "\\u007f")


def checked_schema(schema: Any, param: str) -> dict[str, Any] | bool:
    """The schema as it goes to llguidance: with our layout, and without what could loosen it.

    Raises RequestError for what llguidance does not refuse by itself and cannot enforce.
    """
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise RequestError(f"{param} must be a JSON schema: an object", param)
    for part in _subschemas(schema):
        for keyword in _OLD_KEYWORDS:
            if keyword in part:
                raise RequestError(f"{param}: the keyword {keyword!r} cannot be enforced; leave it out", param)
        _check_min_properties(part, param)
    return {**schema, "x-guidance": _LAYOUT}


def _check_min_properties(schema: dict[str, Any], param: str) -> None:
    """Names that are in no list of properties may come twice in what is generated, and then count once."""
    least = schema.get("minProperties", 0)
    required = schema.get("required", ())
    num_sure = max(len(required) if isinstance(required, list | tuple) else 0, 1)
    if not isinstance(least, int | float) or least > num_sure:
        raise RequestError(
            f"{param}: minProperties {str(least)[:20]} cannot be enforced here; at most 1, or as many as are required",
            param,
        )


def _subschemas(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schema and all schemas inside it (not what it refers to elsewhere)."""
    waiting: list[Any] = [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict):
            continue
        yield part
        waiting += [part[key] for key in _SCHEMAS if key in part]
        for key in _SCHEMA_LISTS:
            waiting += part[key] if isinstance(part.get(key), list) else []
        if isinstance(part.get("items"), list):  # draft 7
            waiting += part["items"]
        for key in _SCHEMA_MAPS:
            waiting += part[key].values() if isinstance(part.get(key), dict) else []


def _escape_slashes(pattern: str) -> str:
    return str(llguidance.regex_to_lark(pattern, use_ascii=""))


def _serialised(grammar: Any, param: str) -> str:
    try:
        text = msgspec.json.encode({"grammars": [grammar]})
    except (RecursionError, ValueError):
        raise RequestError(f"{param} is nested too deeply or is not valid Unicode; simplify it", param) from None
    if len(text) > MAX_GRAMMAR_BYTES:
        raise RequestError(f"{param} is larger than {MAX_GRAMMAR_BYTES:,} bytes; simplify it", param)
    return text.decode()
