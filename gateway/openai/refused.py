"""Fields of the API that Baton knows and cannot honour: their neutral values pass, all others are refused by name."""

from functools import cache
from typing import Any

import msgspec

from ...core.errors import RequestError
from .fields import Refused

# Values that ask for nothing; null always does.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "return_tokens_as_token_ids": (False,),
    "bad_words": ([],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "guided_decoding_backend": ("auto", "guidance"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "documents": ([],),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "background": (False,),
    "context_management": ([],),
    "truncation": ("disabled",),
    "verbosity": ("medium",),
    "effort": ("medium",),
    "summary": ("auto",),
    "mcp_servers": ([],),
}
_WHY = {"chat_template": "a request never brings its own chat template; the model's is used. Leave it out"}


def refuse_unsupported(fields: msgspec.Struct, at: str = "") -> None:
    """Raises RequestError naming the first field of `fields` that asks for something Baton does not do.

    `at` is where in the body `fields` stands.
    """
    for name in _refused_names(type(fields)):
        value = getattr(fields, name)
        if value is not None and not any(_same(value, neutral) for neutral in _NEUTRAL.get(name, ())):
            reason = _WHY.get(name, "not supported; leave it out")
            raise RequestError(f"{at}{name}: {reason}", f"{at}{name}", "unsupported_parameter")


def passing_values(name: str) -> list[Any]:
    """What a refused field of this name may hold."""
    return [None, *_NEUTRAL.get(name, ())]


@cache
def _refused_names(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    return tuple(field.encode_name for field in msgspec.structs.fields(kind) if field.type == Refused)


def _same(value: Any, neutral: Any) -> bool:
    """Equality in which true is not 1."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)
