"""Every feature of the OpenAI surface as a request with a fixed seed, and answers in a form that can be compared.

What depends on when and where an answer was made (ids, times, cached tokens) is left out; a stream is put together to
what the whole answer would have been. Used by test_features.py and scripts/check_features.py.
"""

import json
import math
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

COMPLETIONS, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
TOLERANCE = 2e-3  # of log-probabilities: sums in float32 depend on the batch
LENGTH = 12

_TEXT = "A runner hands over the baton and is done; the next one goes on to the end. " * 3
_IDS = [random.Random(5).randrange(3, 320) for _ in range(150)]
PROMPTS: list[Any] = [_TEXT, _IDS, "short", ["one " * 60, "two " * 50], [_IDS[:120], _IDS[40:140]]]
_MESSAGES = [
    {"role": "system", "content": "Answer in few words, and do not stop before the end of the track. " * 2},
    {"role": "user", "content": [{"type": "text", "text": "Who carries"}, {"type": "text", "text": "the baton?"}]},
]
_PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
_SCHEMA = {"name": "place", "schema": _PLACE, "strict": True}
_TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": _PLACE}},
    {"type": "function", "function": {"name": "get_time"}},
]
_NAMED = {"type": "function", "function": {"name": "get_weather"}}
_CALLED = [
    *_MESSAGES,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"a","days":2}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
]

# Name |-> (path, what is asked besides the prompt). Each is sampled unless it says temperature 0.
_COMPLETION_FIELDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "top_p 0": {"top_p": 0},
    "sampled": {},
    "hot": {"temperature": 2, "return_token_ids": True},
    "n": {"n": 3},
    "n greedy": {"n": 2, "temperature": 0},
    "best_of": {"n": 2, "best_of": 4},
    "best_of, one told": {"best_of": 3, "logprobs": 1},
    "stop string": {"stop": ["e", " t"]},
    "stop string shown": {"stop": "a", "include_stop_str_in_output": True, "n": 2},
    "stop token": {"stop_token_ids": list(range(3, 320, 7)), "return_token_ids": True},
    "stop, not before": {"stop": ["e", "o", "\n", "a"], "min_tokens": 6},
    "logit_bias": {"logit_bias": {"65": 5, "70": -100}},
    "forced token": {"logit_bias": {"65": 100}, "temperature": 0},
    "ends at once": {"logit_bias": {"2": 100}, "temperature": 0},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.5, "temperature": 0},
    "repetition_penalty": {"repetition_penalty": 1.6, "temperature": 0, "n": 2},
    "negative penalties": {"presence_penalty": -2, "frequency_penalty": -1},
    "min_tokens": {"min_tokens": 8, "logit_bias": {"2": 4}},
    "ignore_eos": {"ignore_eos": True, "logit_bias": {"2": 4}},
    "top_k": {"top_k": 4},
    "top_k 1": {"top_k": 1, "temperature": 1.5},
    "min_p": {"min_p": 0.1},
    "top_p": {"top_p": 0.5},
    "all filters": {"top_k": 20, "top_p": 0.8, "min_p": 0.01, "n": 2},
    "logprobs": {"logprobs": 5, "temperature": 0},
    "logprobs, sampled": {"logprobs": 0, "n": 2, "presence_penalty": 1},
    "echo": {"echo": True},
    "echo, logprobs": {"echo": True, "logprobs": 2, "n": 2},
    "echo alone": {"echo": True, "logprobs": 3, "max_tokens": 0},
    "echo alone, twice": {"echo": True, "max_tokens": 0, "n": 2},
    "special tokens": {"skip_special_tokens": False, "logit_bias": {"1": 6}},
    "salt": {"cache_salt": "mine"},
    "priority": {"priority": 2, "user": "somebody"},
    "large seed": {"seed": 2**63 + 11, "n": 2},
    "regex": {"regex": "[ab]{3}-[0-9]{2}", "n": 2},
    "choice": {"structured_outputs": {"choice": ["left", "right", "middle"]}},
    "grammar": {"grammar": 'start: "<" /[0-9]{1,4}/ ">"', "logprobs": 2},
    "one token": {"max_tokens": 1, "logprobs": 1},
}
_CHAT_FIELDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled, n": {"n": 3},
    "logprobs": {"logprobs": True, "top_logprobs": 4},
    "logprobs, n": {"logprobs": True, "n": 2, "temperature": 0, "return_token_ids": True},
    "stop": {"stop": ["e"], "include_stop_str_in_output": True, "logprobs": True},
    "max_completion_tokens": {"max_completion_tokens": 5},
    "continue": {
        "messages": [*_MESSAGES, {"role": "assistant", "content": "The runner is"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "json_object": {"response_format": {"type": "json_object"}, "temperature": 0, "max_tokens": 40},
    "json_schema": {"response_format": {"type": "json_schema", "json_schema": _SCHEMA}, "max_tokens": 120, "n": 2},
    "json_schema, logprobs": {
        "response_format": {"type": "json_schema", "json_schema": _SCHEMA},
        "max_tokens": 120,
        "logprobs": True,
        "top_logprobs": 1,
        "temperature": 0,
    },
    "tools, auto": {"tools": _TOOLS},
    "tools, none": {"tools": _TOOLS, "tool_choice": "none"},
    "tools, required": {"tools": _TOOLS, "tool_choice": "required", "max_tokens": 200, "n": 2},
    "tools, one": {"tools": _TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200},
    "tools, named": {"tools": _TOOLS, "tool_choice": _NAMED, "max_tokens": 120, "temperature": 0},
    "tools, answered": {"tools": _TOOLS, "messages": _CALLED},
    "penalties": {"frequency_penalty": 2, "presence_penalty": 1, "repetition_penalty": 1.2},
}

# The other spellings of chat. Messages have no seed.
_FORMAT = {"type": "json_schema", "name": "place", "schema": _PLACE}
_OTHER_FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    "response": (RESPONSES, {"max_output_tokens": LENGTH}),
    "response, greedy": (RESPONSES, {"max_output_tokens": LENGTH, "temperature": 0, "instructions": "Be brief. " * 9}),
    "response, penalties": (RESPONSES, {"max_output_tokens": LENGTH, "frequency_penalty": 2, "top_k": 9}),
    "response, schema": (RESPONSES, {"max_output_tokens": 120, "text": {"format": _FORMAT}}),
    "response, call": (
        RESPONSES,
        {
            "max_output_tokens": 200,
            "tools": [{"type": "function", "name": "get_weather", "parameters": _PLACE}],
            "tool_choice": {"type": "function", "name": "get_weather"},
        },
    ),
    "message": (MESSAGES, {"max_tokens": LENGTH, "temperature": 0, "system": "Be brief. " * 9}),
    "message, stopped": (MESSAGES, {"max_tokens": LENGTH, "temperature": 0, "stop_sequences": ["e", "a", "o"]}),
    "message, call": (
        MESSAGES,
        {
            "max_tokens": 200,
            "temperature": 0,
            "tools": [{"name": "get_weather", "input_schema": _PLACE}],
            "tool_choice": {"type": "tool", "name": "get_weather"},
        },
    ),
}


def requests(model: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Name |-> (path, body). Completions go round the kinds of prompts; what needs prompts as text has one."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for index, (name, fields) in enumerate(_COMPLETION_FIELDS.items()):
        for prompt in (PROMPTS[index % len(PROMPTS)], _IDS[: 100 + index]):
            kind = "ids" if prompt != PROMPTS[index % len(PROMPTS)] else f"prompt {index % len(PROMPTS)}"
            body = {"model": model, "prompt": prompt, "max_tokens": LENGTH, "seed": 7 + index}
            found[f"completion: {name}, {kind}"] = (COMPLETIONS, body | fields)
    for index, (name, fields) in enumerate(_CHAT_FIELDS.items()):
        body = {"model": model, "messages": _MESSAGES, "max_tokens": LENGTH, "seed": 70 + index}
        found[f"chat: {name}"] = (CHAT, body | fields)
    question = _MESSAGES[1:]
    for index, (name, (path, fields)) in enumerate(_OTHER_FIELDS.items()):
        needed = {"messages": question} if path == MESSAGES else {"input": "Who carries the baton? " * 9, "seed": index}
        found[f"other: {name}"] = (path, {"model": model} | needed | fields)
    return found


def num_scored_prompts() -> int:
    """Prompts whose own log-probabilities are asked for: decode workers compute those themselves."""
    bodies = [body for _, body in requests("").values() if body.get("echo") and "logprobs" in body]
    one = [body for body in bodies if isinstance(body["prompt"], str) or isinstance(body["prompt"][0], int)]
    return len(one) + sum(len(body["prompt"]) for body in bodies if body not in one)


def ask(server: Any, path: str, body: dict[str, Any], *, streamed: bool) -> list[dict[str, Any]]:
    """The choices. `best_of` cannot be streamed and is asked for whole."""
    if path in (RESPONSES, MESSAGES):
        return [_ask_other(server, path, body, streamed=streamed)]
    if not streamed or body.get("best_of") is not None:
        status, answer = server.request("POST", path, body)
        assert status == 200, (answer, body)
        return [_plain(choice, choice.get("message", choice)) for choice in answer["choices"]]
    status, text = server.request("POST", path, body | {"stream": True, "stream_options": {"include_usage": True}})
    assert status == 200, (text, body)
    *chunks, usage, done = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    assert done == "[DONE]", done
    assert json.loads(usage)["choices"] == []
    joined: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in json.loads(chunk)["choices"]:
            _join(joined, _plain(choice, choice.get("delta", choice)))
    return [joined[index] for index in sorted(joined)]


def _ask_other(server: Any, path: str, body: dict[str, Any], *, streamed: bool) -> dict[str, Any]:
    """What an answer of Responses or Messages says, without ids: [kind, text or name, arguments] of each part."""
    status, answer = server.request("POST", path, body | {"stream": streamed})
    assert status == 200, (answer, body)
    if streamed:
        events = [json.loads(line[6:]) for line in answer.split("\n") if line.startswith("data: ")]
        answer = events[-1]["response"] if path == RESPONSES else _joined_message(events)
    parts = []
    for item in answer["output"] if path == RESPONSES else answer["content"]:
        match item["type"]:
            case "message":
                parts += [("text", part["text"], None) for part in item["content"]]
            case "text":
                parts.append(("text", item["text"], None))
            case "function_call":
                parts.append(("call", item["name"], json.loads(item["arguments"])))
            case "tool_use":
                parts.append(("call", item["name"], item["input"]))
    return {
        "parts": [list(part) for part in parts],
        "finish_reason": answer["status"] if path == RESPONSES else answer["stop_reason"],
        "stopped_by": answer.get("stop_sequence"),
    }


def _joined_message(events: list[dict[str, Any]]) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    ended: dict[str, Any] = {}
    for event in events:
        match event["type"]:
            case "content_block_start":
                blocks.append(event["content_block"] | {"arguments": ""})
            case "content_block_delta" if event["delta"]["type"] == "text_delta":
                blocks[event["index"]]["text"] += event["delta"]["text"]
            case "content_block_delta":
                blocks[event["index"]]["arguments"] += event["delta"]["partial_json"]
            case "message_delta":
                ended = event["delta"]
    assert events[-1]["type"] == "message_stop", events[-1]
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["arguments"])
    return ended | {"content": blocks}


def _plain(choice: dict[str, Any], message: dict[str, Any]) -> dict[str, Any]:
    """One choice, whole or of a chunk, in the same form for both APIs. A call without arguments has the index only."""
    calls = {}
    for position, call in enumerate(message.get("tool_calls") or []):
        function, index = call["function"], call.get("index", position)
        assert index not in calls, f"two deltas of one call in one chunk: {message}"
        calls[index] = [function.get("name") or "", function.get("arguments") or ""]
    return {
        "index": choice["index"],
        "text": message.get("text") or message.get("content") or "",
        "reasoning": message.get("reasoning_content") or "",
        "calls": calls,
        "finish_reason": choice["finish_reason"],
        "token_ids": choice.get("token_ids") or [],
        "logprobs": _plain_logprobs(choice["logprobs"]),
    }


def _plain_logprobs(logprobs: dict[str, Any] | None) -> list[list[Any]]:
    """[token, log-probability, alternatives by token] of each token."""
    if logprobs is None:
        return []
    if "content" in logprobs:
        told = [
            (t["token"], t["logprob"], {top["token"]: top["logprob"] for top in t["top_logprobs"]})
            for t in logprobs["content"]
        ]
    else:
        told = list(zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True))
    return [[token, logprob, tops or {}] for token, logprob, tops in told]


def _join(joined: dict[int, dict[str, Any]], piece: dict[str, Any]) -> None:
    known = joined.setdefault(piece["index"], piece)
    if known is piece:
        return
    for name in ("text", "reasoning", "token_ids", "logprobs"):
        known[name] += piece[name]
    for index, (name, arguments) in piece["calls"].items():
        call = known["calls"].setdefault(index, ["", ""])
        call[0], call[1] = call[0] + name, call[1] + arguments
    known["finish_reason"] = known["finish_reason"] or piece["finish_reason"]


def differences(expected: Any, found: Any, at: str = "") -> list[str]:
    """Where two answers differ; numbers may by TOLERANCE."""
    if isinstance(expected, dict) and isinstance(found, dict):
        if expected.keys() != found.keys():
            return [f"{at}: {sorted(map(str, expected))} != {sorted(map(str, found))}"]
        return [line for key in expected for line in differences(expected[key], found[key], f"{at}.{key}")]
    if isinstance(expected, list) and isinstance(found, list):
        if len(expected) != len(found):
            return [f"{at}: {len(expected)} entries != {len(found)}"]
        pairs = enumerate(zip(expected, found, strict=True))
        return [line for index, (one, other) in pairs for line in differences(one, other, f"{at}[{index}]")]
    if isinstance(expected, float) and isinstance(found, float):
        same = math.isclose(expected, found, rel_tol=0, abs_tol=TOLERANCE)
    else:
        same = expected == found
    return [] if same else [f"{at}: {expected!r:.200} != {found!r:.200}"]


def answers(server: Any, *, streamed: bool, at_once: int) -> dict[str, list[dict[str, Any]]]:
    """All requests, so many at a time."""
    asked = requests(server.model)
    with ThreadPoolExecutor(at_once) as clients:
        told = clients.map(lambda request: ask(server, *request, streamed=streamed), asked.values())
        return dict(zip(asked, told, strict=True))


def all_differences(expected: dict[str, Any], found: dict[str, Any], where: str) -> list[str]:
    """Of two results of `answers`."""
    return [f"{where}: {name}{line}" for name in expected for line in differences(expected[name], found[name])]
