"""What clients send: JSON of the OpenAI API in, a checked and frozen `ParsedRequest` out.

All checks that need no tokenizer and no worker are here; whatever passes cannot raise in a worker. Fields that Baton
does not know are ignored; fields that it knows and cannot honour yet are refused by name (`unsupported.py`), because an
ignored one would give another answer than was asked for. Error texts are bounded and never repeat long input.
"""

import secrets
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from ..core.errors import RequestError
from ..core.request import SamplingParams
from .json_errors import bounded, field_of, read_json, refuse_invalid
from .unsupported import UnsupportedFields, refuse_unsupported
from .urgency import PRIORITIES, given_tier

MAX_PROMPTS = 128
MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 128
ROLES = ("system", "developer", "user", "assistant", "tool")
DEFAULT_COMPLETION_TOKENS = 16  # what the completions API generates when nothing is asked for

_TokenIds = list[Annotated[int, Meta(ge=0)]]
_T = TypeVar("_T")


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _CommonFields(UnsupportedFields, kw_only=True):
    """Fields of both endpoints; None is the same as absent."""

    model: str | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: _TokenIds | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    return_token_ids: bool | None = None
    priority: Annotated[int, Meta(ge=PRIORITIES[0], le=PRIORITIES[1])] | None = None
    service_tier: str | None = None


class _CompletionBody(_CommonFields, kw_only=True):
    prompt: Any = None


class _ContentPart(msgspec.Struct):
    type: str
    text: str | None = None


class _ChatMessage(msgspec.Struct):
    role: str
    content: str | list[_ContentPart] | None = None
    name: str | None = None
    tool_calls: Any = None
    function_call: Any = None


class _ChatBody(_CommonFields, kw_only=True):
    messages: list[_ChatMessage]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None


class ParsedRequest(msgspec.Struct, frozen=True):
    """A request whose fields are all valid by themselves.

    Exactly one of `texts`, `token_ids` (one entry a prompt, in the client's order) and `messages` is given.
    `max_tokens` is None when the client did not say; `sampling.max_tokens` is decided when the prompt's length is
    known. `sampling.stop_token_ids` holds only what the client asked for. `service_tier` is what the answer says.
    """

    sampling: SamplingParams
    max_tokens: int | None
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    return_token_ids: bool = False
    texts: tuple[str, ...] | None = None
    token_ids: tuple[list[int], ...] | None = None
    messages: tuple[dict[str, str], ...] | None = None
    priority: int = 0
    service_tier: str | None = None


class RequestParser:
    """Parses the bodies of both endpoints for one served model.

    `vocab_size` is the width of the model's logits: the ids a prompt may hold. Everything wrong raises RequestError
    with the field in `param` and status 400, or 404 for another model's name.
    """

    def __init__(self, served_model: str, vocab_size: int):
        self._served_model = served_model
        self._vocab_size = vocab_size
        self._completion = msgspec.json.Decoder(_CompletionBody)
        self._chat = msgspec.json.Decoder(_ChatBody)

    def completion(self, body: bytes) -> ParsedRequest:
        """The body of POST /v1/completions."""
        fields = read_json(self._completion, body)
        self.check_model(fields.model)
        refuse_unsupported(fields)
        texts, token_ids = self._prompts(fields.prompt)
        return self._parsed(fields, fields.max_tokens, texts=texts, token_ids=token_ids)

    def chat(self, body: bytes) -> ParsedRequest:
        """The body of POST /v1/chat/completions."""
        fields = read_json(self._chat, body)
        self.check_model(fields.model)
        refuse_unsupported(fields)
        if not fields.messages:
            raise RequestError("messages is empty: send at least one message", "messages")
        messages = tuple(_plain_message(message, index) for index, message in enumerate(fields.messages))
        max_tokens = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
        return self._parsed(fields, max_tokens, messages=messages)

    def check_model(self, model: str | None) -> None:
        """Raises RequestError (404) for the name of a model that is not served here."""
        if model is not None and model != self._served_model:
            raise RequestError(
                f"the model {bounded(model, 80)!r} is not served here; this server has {self._served_model!r}",
                "model",
                "model_not_found",
                404,
            )

    def _parsed(
        self,
        fields: _CommonFields,
        max_tokens: int | None,
        *,
        texts: tuple[str, ...] | None = None,
        token_ids: tuple[list[int], ...] | None = None,
        messages: tuple[dict[str, str], ...] | None = None,
    ) -> ParsedRequest:
        if fields.stream_options is not None and not fields.stream:
            raise RequestError("stream_options is only allowed together with stream: true", "stream_options")
        return ParsedRequest(
            sampling=self._sampling(fields),
            max_tokens=max_tokens,
            stop=_stop_strings(fields.stop),
            stream=bool(fields.stream),
            include_usage=fields.stream_options is not None and bool(fields.stream_options.include_usage),
            return_token_ids=bool(fields.return_token_ids),
            texts=texts,
            token_ids=token_ids,
            messages=messages,
            priority=fields.priority or 0,
            service_tier=given_tier(fields.service_tier),
        )

    def _sampling(self, fields: _CommonFields) -> SamplingParams:
        stop_token_ids = fields.stop_token_ids or []
        if len(stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise RequestError(f"stop_token_ids has more than {MAX_STOP_TOKEN_IDS} entries", "stop_token_ids")
        self._check_vocabulary(stop_token_ids, "stop_token_ids")
        top_k = fields.top_k or 0
        return SamplingParams(
            temperature=1.0 if fields.temperature is None else fields.temperature,
            top_k=0 if top_k < 0 else min(top_k, self._vocab_size),
            top_p=1.0 if fields.top_p is None else fields.top_p,
            min_p=fields.min_p or 0.0,
            seed=_seed(fields.seed),
            min_tokens=fields.min_tokens or 0,
            ignore_eos=bool(fields.ignore_eos),
            stop_token_ids=tuple(dict.fromkeys(stop_token_ids)),
        )

    def _prompts(self, prompt: Any) -> tuple[tuple[str, ...] | None, tuple[list[int], ...] | None]:
        """(texts, None) or (None, lists of token ids). `prompt` is whatever JSON the client sent."""
        if isinstance(prompt, str):
            prompt = [prompt]
        if not isinstance(prompt, list):
            raise RequestError("prompt must be a string, a list of strings, token ids, or lists of token ids", "prompt")
        if not prompt:
            raise RequestError("prompt is empty: send at least one character or token", "prompt")
        first = prompt[0]
        if not isinstance(first, str | list):
            return None, (self._token_ids(prompt, "prompt"),)
        if len(prompt) > MAX_PROMPTS:
            raise RequestError(
                f"prompt holds {len(prompt)} prompts; at most {MAX_PROMPTS} can be sent at once", "prompt"
            )
        if isinstance(first, str):
            texts = _convert(prompt, list[str], "prompt")
            _refuse_empty(texts)
            return tuple(texts), None
        lists = _convert(prompt, list[list[Any]], "prompt")
        _refuse_empty(lists)
        return None, tuple(self._token_ids(ids, f"prompt[{index}]") for index, ids in enumerate(lists))

    def _token_ids(self, values: list[Any], param: str) -> list[int]:
        token_ids = _convert(values, _TokenIds, param)
        self._check_vocabulary(token_ids, param)
        return token_ids

    def _check_vocabulary(self, token_ids: list[int], param: str) -> None:
        if token_ids and max(token_ids) >= self._vocab_size:
            index = next(i for i, token_id in enumerate(token_ids) if token_id >= self._vocab_size)
            raise RequestError(
                f"{param}[{index}] is not a token of this model, whose ids are 0 to {self._vocab_size - 1}",
                field_of(param),
            )


def _convert(values: list[Any], kind: type[_T], param: str) -> _T:
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        refuse_invalid(error, param)


def _refuse_empty(prompts: list[str] | list[list[Any]]) -> None:
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise RequestError(f"prompt {index} is empty: send at least one character or token", "prompt")


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = [stop] if isinstance(stop, str) else stop or []
    if len(strings) > MAX_STOP_STRINGS:
        raise RequestError(f"stop has {len(strings)} strings; at most {MAX_STOP_STRINGS} are allowed", "stop")
    if "" in strings:
        raise RequestError("stop holds an empty string, which would end every answer at once; leave it out", "stop")
    return tuple(strings)


def _seed(seed: int | None) -> int:
    """An unsigned 64-bit number; negative ones wrap around, and who gives none gets a random one."""
    if seed is None:
        return secrets.randbits(64)
    if not -(2**63) <= seed < 2**64:
        raise RequestError("seed must be a 64-bit integer", "seed")
    return seed % 2**64


def _plain_message(message: _ChatMessage, index: int) -> dict[str, str]:
    """The message as chat templates expect it: content is one text (parts are joined by line breaks)."""
    at = f"messages[{index}]"
    if message.role not in ROLES:
        raise RequestError(f"{at}.role must be one of {', '.join(ROLES)}", f"{at}.role")
    for field in ("tool_calls", "function_call"):
        if getattr(message, field):
            raise RequestError(f"{at}.{field} is not supported yet; send the text of the message only", f"{at}.{field}")
    content = message.content
    if content is None:
        raise RequestError(f"{at}.content is missing: every message needs a text", f"{at}.content")
    if not isinstance(content, str):
        content = "\n".join(_part_text(part, f"{at}.content[{i}]") for i, part in enumerate(content))
    plain = {"role": message.role, "content": content}
    return plain if message.name is None else plain | {"name": message.name}


def _part_text(part: _ContentPart, at: str) -> str:
    if part.type != "text":
        raise RequestError(f"{at}.type: only parts of type 'text' are supported", f"{at}.type")
    if part.text is None:
        raise RequestError(f"{at}.text is missing", f"{at}.text")
    return part.text
