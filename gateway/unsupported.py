"""Fields of the API that Baton knows and cannot honour yet: their neutral values pass, all others are refused."""

from typing import Any

import msgspec

from ..core.errors import RequestError


class UnsupportedFields(msgspec.Struct, kw_only=True):
    """Base of the request bodies of both endpoints; any JSON."""

    n: Any = None
    best_of: Any = None
    echo: Any = None
    suffix: Any = None
    logprobs: Any = None
    top_logprobs: Any = None
    prompt_logprobs: Any = None
    logit_bias: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    length_penalty: Any = None
    use_beam_search: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    cache_salt: Any = None
    include_stop_str_in_output: Any = None
    skip_special_tokens: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    truncate_prompt_tokens: Any = None
    regex: Any = None
    grammar: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    continue_final_message: Any = None
    add_generation_prompt: Any = None


# Values that ask for nothing; null always does.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),  # 0 asks for something in completions
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "response_format": ({"type": "text"},),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "bad_words": ([],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
}


def refuse_unsupported(fields: UnsupportedFields) -> None:
    """Raises RequestError naming the first field of `fields` that asks for something Baton does not do yet."""
    for name in UnsupportedFields.__struct_fields__:
        value = getattr(fields, name)
        if value is not None and not any(_same(value, neutral) for neutral in _NEUTRAL.get(name, ())):
            raise RequestError(f"{name} is not supported yet; leave it out", name, "unsupported_parameter")


def _same(value: Any, neutral: Any) -> bool:
    """Equality in which true is not 1."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)
