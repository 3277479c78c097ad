"""Turns what the JSON decoder complains about into errors that name the client's field."""

import json
import re
from typing import Any, NoReturn, TypeVar

import msgspec

from ...core.errors import RequestError
from ..urgency import PRIORITIES

_LONGEST_TEXT = 300  # characters of a decoder's complaint
_LONGEST_PARAM = 120
_PATH = re.compile(r" - at `(?:key in )?\$\.?([^`]*)`$")
_MISSING = re.compile(r"missing required field `(\w+)`")
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
# Fields whose whole range is worth telling: the decoder names only the bound that was passed.
_RANGES = {"priority": f"must be a whole number from {PRIORITIES[0]} (first) to {PRIORITIES[1]} (last), 0 is usual"}
# What to send where a body has not what it is about.
_HINTS = {
    "prompt": ": send a text, a list of texts, or token ids",
    "messages": ": send a list of objects, each with a role and a content",
}

_T = TypeVar("_T")


def bounded(text: str, longest: int = _LONGEST_TEXT) -> str:
    """`text`, shortened visibly when it is longer than `longest` characters."""
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def read_json(decoder: msgspec.json.Decoder[_T], body: bytes) -> _T:
    """Decode a request body. Raises RequestError (400) naming the field, or saying that the body is not JSON.

    NaN, Infinity and numbers beyond a double are refused by the decoder.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        refuse_invalid(error)
    except RecursionError:
        raise RequestError("the body is nested too deeply; send flatter JSON", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if (param := _surrogate_field(body)) is not None:
            raise RequestError(
                f"{param} is not valid Unicode: it holds a lone surrogate. Send whole characters", field_of(param)
            ) from None
        raise RequestError(f"the body is not valid JSON: {bounded(str(error))}", code="invalid_json") from None


def refuse_invalid(error: msgspec.ValidationError, prefix: str = "") -> NoReturn:
    """Raises the RequestError for a field of the wrong type or range.

    `prefix` is the field whose value was converted by itself.
    """
    text = str(error)
    found = _PATH.search(text)
    path = prefix + (found[1] if found else "")
    missing = _MISSING.search(text)
    if missing:
        path = f"{path}.{missing[1]}" if path else missing[1]
        message = f"{path} is missing{_HINTS.get(path, '')}"
    else:
        reason = _RANGES.get(path) or bounded(_PATH.sub("", text))
        message = f"{path}: {reason[0].lower()}{reason[1:]}" if path else f"the body: {reason[0].lower()}{reason[1:]}"
    raise RequestError(bounded(message), field_of(path)) from None


def field_of(path: str) -> str | None:
    """What `param` says of a place in the body: `stop` for `stop[3]`, but `messages[3].role` in full."""
    path = path.partition("[...]")[0]  # a value of an object, whose key the decoder does not tell
    return bounded(path if "." in path else path.partition("[")[0], _LONGEST_PARAM) or None


def _surrogate_field(body: bytes) -> str | None:
    """The first field whose text holds half of a surrogate pair, which no UTF-8 text can hold."""
    if not _SURROGATE_ESCAPE.search(body):
        return None
    try:
        path = _find_surrogate(json.loads(body), "")
    except (ValueError, RecursionError):
        return None
    return None if path is None else bounded(path, _LONGEST_PARAM)


def _find_surrogate(value: Any, path: str) -> str | None:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return path or "the body"
        return None
    if isinstance(value, dict):
        if (bad_key := _find_surrogate("".join(value), path)) is not None:
            return bad_key
        children = ((child, f"{path}.{key}" if path else key) for key, child in value.items())
    elif isinstance(value, list):
        children = ((child, f"{path}[{index}]") for index, child in enumerate(value))
    else:
        return None
    return next((found for child, at in children if (found := _find_surrogate(child, at)) is not None), None)
