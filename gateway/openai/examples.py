"""Bodies that /openapi.json shows: each can be sent as it is. None names a model, for the one that is served is meant.

Ids of files, batches and answers are those of the place where they were made, so examples name none of these either.
"""

from typing import Any

_MESSAGES = [{"role": "user", "content": "Who carries the baton?"}]
_PLACE = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_TURNS = [
    {"role": "system", "content": "Answer in few words."},
    *_MESSAGES,
    {"role": "assistant", "content": "The runner."},
    {"role": "user", "content": [{"type": "text", "text": "And then?"}]},
]

# Path |-> name |-> body.
EXAMPLES: dict[str, dict[str, dict[str, Any]]] = {
    "/v1/completions": {
        "text": {"prompt": "A runner hands over", "max_tokens": 4},
        "sampled": {"prompt": ["A runner", "A race"], "max_tokens": 4, "n": 2, "seed": 7, "temperature": 0.7},
        "streamed": {"prompt": [5, 6, 7], "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}},
        "scored": {"prompt": "A runner", "max_tokens": 0, "echo": True, "logprobs": 2},
    },
    "/v1/chat/completions": {
        "question": {"messages": _MESSAGES, "max_tokens": 4},
        "conversation": {"messages": _TURNS, "max_tokens": 4, "logprobs": True, "top_logprobs": 2},
        "streamed": {"messages": _MESSAGES, "max_tokens": 4, "stream": True},
        "tool": {
            "messages": _MESSAGES,
            "max_tokens": 4,
            "tools": [{"type": "function", "function": {"name": "get_weather", "parameters": _PLACE}}],
            "tool_choice": "required",
        },
        "JSON": {
            "messages": _MESSAGES,
            "max_tokens": 4,
            "response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": _PLACE}},
        },
    },
    "/v1/responses": {
        "question": {"input": "Who carries the baton?", "max_output_tokens": 4},
        "items": {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Who?"}]}], "store": False},
        "streamed": {"input": "Who?", "instructions": "Be brief.", "max_output_tokens": 4, "stream": True},
    },
    "/v1/responses/input_tokens": {"question": {"input": "Who carries the baton?"}},
    "/v1/messages": {
        "question": {"messages": _MESSAGES, "max_tokens": 4},
        "streamed": {"messages": _MESSAGES, "system": "Be brief.", "max_tokens": 4, "stream": True},
        "tool": {
            "messages": _MESSAGES,
            "max_tokens": 4,
            "tools": [{"name": "get_weather", "input_schema": _PLACE}],
            "tool_choice": {"type": "any"},
        },
    },
    "/v1/messages/count_tokens": {"question": {"messages": _MESSAGES}},
    "/tokenize": {
        "text": {"prompt": "Grüße, 世界!", "return_token_strs": True},
        "messages": {"messages": _TURNS},
    },
    "/detokenize": {"ids": {"tokens": [5, 6, 7]}},
}
