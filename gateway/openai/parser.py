"""RequestParser: bodies in, checked requests out.

All checks that need no tokenizer and no worker are here; whatever passes cannot raise in a worker. Error texts are
bounded and never repeat long input.
"""

from typing import Any, TypeVar

import msgspec

from ...core.errors import RequestError
from ...vocab.tool_format import HERMES, ToolFormat
from ..urgency import given_tier
from .fields import (
    ChatCompletionRequest,
    CommonFields,
    CompletionRequest,
    DetokenizeRequest,
    StreamOptions,
    TokenIds,
    TokenizeRequest,
)
from .grammar_fields import grammar_of
from .json_errors import bounded, read_json, refuse_invalid
from .messages import chat_prompt
from .refused import refuse_unsupported
from .request import ParsedRequest, PromptSource, TextPrompts, TokenPrompts
from .sampling import check_vocabulary, sampling_params, text_rules
from .tool_fields import checked_tools, with_tool_use

MAX_PROMPTS = 128
MAX_ANSWERS = 1024  # prompts x what is sampled of each

_T = TypeVar("_T")


class RequestParser:
    """Parses bodies for one served model.

    `vocab_size` is the width of the model's logits: the ids a prompt may hold. Everything wrong raises RequestError
    with the field in `param` and status 400, or 404 for another model's name.
    """

    def __init__(self, served_model: str, vocab_size: int, tool_format: ToolFormat = HERMES):
        self._tool_format = tool_format
        self._served_model = served_model
        self._vocab_size = vocab_size
        self._completion = msgspec.json.Decoder(CompletionRequest)
        self._chat = msgspec.json.Decoder(ChatCompletionRequest)
        self._tokenize = msgspec.json.Decoder(TokenizeRequest)
        self._detokenize = msgspec.json.Decoder(DetokenizeRequest)

    def completion(self, body: bytes) -> ParsedRequest:
        """The body of POST /v1/completions."""
        fields = read_json(self._completion, body)
        self.check_model(fields.model)
        refuse_unsupported(fields)
        prompt = self._prompts(fields.prompt, add_special_tokens=fields.add_special_tokens is not False)
        if fields.max_tokens == 0 and not fields.echo:
            raise RequestError("max_tokens 0 needs echo: true; otherwise there is nothing to answer", "max_tokens")
        num_choices = fields.n or 1
        num_sampled = num_choices if fields.best_of is None else fields.best_of
        if num_sampled < num_choices:
            raise RequestError(f"best_of {num_sampled} is less than n {num_choices}", "best_of")
        if fields.stream and num_sampled > num_choices:
            raise RequestError("best_of cannot be streamed: which answers are best is known at the end", "best_of")
        if (num_answers := prompt.num_prompts * num_sampled) > MAX_ANSWERS:
            raise RequestError(
                f"{num_answers} answers are asked for ({prompt.num_prompts} prompts, {num_sampled} each); at most "
                f"{MAX_ANSWERS} can be generated at once",
                "n" if fields.best_of is None else "best_of",
            )
        num_logprobs = fields.logprobs
        if num_sampled > num_choices and num_logprobs is None:
            num_logprobs = 0  # to choose by
        request = self._parsed(fields, prompt, num_logprobs, fields.max_tokens)
        return msgspec.structs.replace(
            request, num_sampled=num_sampled, echo=bool(fields.echo), tells_logprobs=fields.logprobs is not None
        )

    def chat(self, body: bytes) -> ParsedRequest:
        """The body of POST /v1/chat/completions."""
        return self.chat_fields(read_json(self._chat, body))

    def chat_fields(self, fields: ChatCompletionRequest) -> ParsedRequest:
        """A chat request, however it came."""
        self.check_model(fields.model)
        refuse_unsupported(fields)
        if fields.top_logprobs and not fields.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
        max_tokens = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
        num_logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
        tools = checked_tools(fields.tools or [])
        prompt = chat_prompt(fields, () if fields.tool_choice == "none" else tools)
        return with_tool_use(self._parsed(fields, prompt, num_logprobs, max_tokens), fields, tools, self._tool_format)

    def tokenize(self, body: bytes) -> tuple[PromptSource, bool]:
        """The body of POST /tokenize: (prompt, whether the tokens' texts are asked for)."""
        fields = read_json(self._tokenize, body)
        self.check_model(fields.model)
        refuse_unsupported(fields)
        wants_strings = bool(fields.return_token_strs)
        if fields.messages is not None:
            if fields.prompt is not None:
                raise RequestError("send either prompt or messages", "prompt")
            return chat_prompt(fields, checked_tools(fields.tools or [])), wants_strings
        if fields.prompt is None:
            raise RequestError("prompt is missing: send a text, or messages", "prompt")
        return TextPrompts((fields.prompt,), fields.add_special_tokens is not False), wants_strings

    def detokenize(self, body: bytes) -> list[int]:
        """The body of POST /detokenize: its token ids."""
        fields = read_json(self._detokenize, body)
        self.check_model(fields.model)
        check_vocabulary(fields.tokens, "tokens", self._vocab_size)
        return fields.tokens

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
        self, fields: CommonFields, prompt: PromptSource, num_logprobs: int | None, max_tokens: int | None
    ) -> ParsedRequest:
        if fields.stream_options is not None and not fields.stream:
            raise RequestError("stream_options is only allowed together with stream: true", "stream_options")
        options = fields.stream_options or StreamOptions()
        grammar, grammar_param = grammar_of(fields)
        sampling = sampling_params(fields, num_logprobs, self._vocab_size)
        return ParsedRequest(
            prompt=prompt,
            sampling=msgspec.structs.replace(sampling, grammar=grammar),
            max_tokens=max_tokens,
            rules=text_rules(fields),
            num_choices=fields.n or 1,
            num_sampled=fields.n or 1,
            tells_logprobs=num_logprobs is not None,
            stream=bool(fields.stream),
            include_usage=bool(options.include_usage),
            continuous_usage=bool(options.continuous_usage_stats),
            return_token_ids=bool(fields.return_token_ids),
            priority=fields.priority or 0,
            service_tier=given_tier(fields.service_tier),
            cache_salt=fields.cache_salt,
            grammar_param=grammar_param,
        )

    def _prompts(self, prompt: Any, *, add_special_tokens: bool) -> TextPrompts | TokenPrompts:
        """`prompt` is whatever JSON the client sent."""
        if isinstance(prompt, str):
            prompt = [prompt]
        if not isinstance(prompt, list):
            raise RequestError("prompt must be a string, a list of strings, token ids, or lists of token ids", "prompt")
        if not prompt:
            raise RequestError("prompt is empty: send at least one character or token", "prompt")
        first = prompt[0]
        if not isinstance(first, str | list):
            return TokenPrompts((self._token_ids(prompt, "prompt"),))
        if len(prompt) > MAX_PROMPTS:
            raise RequestError(
                f"prompt holds {len(prompt)} prompts; at most {MAX_PROMPTS} can be sent at once", "prompt"
            )
        if isinstance(first, str):
            texts = _convert(prompt, list[str], "prompt")
            _refuse_empty(texts)
            return TextPrompts(tuple(texts), add_special_tokens)
        lists = _convert(prompt, list[list[Any]], "prompt")
        _refuse_empty(lists)
        return TokenPrompts(tuple(self._token_ids(ids, f"prompt[{index}]") for index, ids in enumerate(lists)))

    def _token_ids(self, values: list[Any], param: str) -> list[int]:
        token_ids = _convert(values, TokenIds, param)
        check_vocabulary(token_ids, param, self._vocab_size)
        return token_ids


def _convert(values: list[Any], kind: type[_T], param: str) -> _T:
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        refuse_invalid(error, param)


def _refuse_empty(prompts: list[str] | list[list[Any]]) -> None:
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise RequestError(f"prompt {index} is empty: send at least one character or token", "prompt")
