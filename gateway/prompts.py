"""From a parsed request to token ids with a decided length: chat template, tokenizer, context limits."""

import secrets
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from ..core.errors import RequestError
from ..core.request import SamplingParams
from ..vocab.chat_template import ChatTemplate
from ..vocab.model_config import ModelConfig
from ..vocab.tokenizer import Tokenizer
from .batch_tokenizer import BatchTokenizer
from .openai.request import ChatPrompt, ParsedRequest, PromptSource, TextPrompts, TokenPrompts

DEFAULT_COMPLETION_TOKENS = 16  # what the completions API generates when nothing is asked for

# Texts far over the context are refused without tokenising all of them, so that no client keeps the tokenizer busy.
# Real text has 2 to 5 characters a token: one that is longer than the first number allows is tried on its beginning.
_UNUSUAL_CHARACTERS_PER_TOKEN = 8
_MOST_CHARACTERS_PER_TOKEN = 256

_T = TypeVar("_T")


class Limits(msgspec.Struct, frozen=True):
    """How many tokens a request may have in all: what the model allows, and what the largest decode pool holds."""

    context_length: int
    pool_tokens: int

    @property
    def max_tokens(self) -> int:
        return min(self.context_length, self.pool_tokens)


class Prompt(msgspec.Struct, frozen=True):
    """One prompt, ready to be sent: `sampling` has its max_tokens and the model's end-of-sequence tokens.

    `num_prompt_logprobs` as in core's Request. `echo`: the text that every answer begins with, if any.
    """

    token_ids: list[int]
    sampling: SamplingParams
    num_prompt_logprobs: int | None = None
    echo: str | None = None


class PromptBuilder:
    """Chat template and tokenizer of the served model."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, model: ModelConfig):
        self._tokenizer = tokenizer
        self._batch = BatchTokenizer(tokenizer)
        self._template = template
        self.eos_token_ids = tuple(dict.fromkeys((*model.eos_token_ids, *tokenizer.eos_token_ids)))

    async def build(self, request: ParsedRequest, limits: Limits) -> list[Prompt]:
        """The prompts of a request in the client's order. Raises RequestError (400) for what does not fit."""
        all_token_ids = await self.encode(request.prompt, limits)
        prompts = [self._prompt(request, token_ids, limits) for token_ids in all_token_ids]
        if not request.echo:
            return prompts
        echoes = await self.call(lambda: self._echoes(request, all_token_ids))
        return [
            msgspec.structs.replace(prompt, echo=echo, num_prompt_logprobs=request.num_prompt_logprobs)
            for prompt, echo in zip(prompts, echoes, strict=True)
        ]

    async def encode(self, source: PromptSource, limits: Limits) -> Sequence[list[int]]:
        """Token ids of each prompt. Raises RequestError (400) when a template refuses, and for endless texts."""
        if isinstance(source, TokenPrompts):
            return source.token_ids
        texts, param = (
            ((await self._chat(source),), "messages")
            if isinstance(source, ChatPrompt)
            else (
                source.texts,
                "prompt",
            )
        )
        for text in texts:
            await self._refuse_endless(text, limits, param)
        return await self._batch.encode(texts, add_special_tokens=source.add_special_tokens)

    async def call(self, function: Callable[[], _T]) -> _T:
        """Runs other work that takes long on the tokenizer's thread."""
        return await self._batch.call(function)

    def close(self) -> None:
        self._batch.close()

    async def _chat(self, prompt: ChatPrompt) -> str:
        template = self._template
        if template is None:
            raise RequestError("this model has no chat template; use /v1/completions", "messages")
        return await self._batch.call(lambda: _render(template, prompt))

    def _echoes(self, request: ParsedRequest, all_token_ids: Sequence[list[int]]) -> list[str]:
        """The prompts as texts, in the client's own words where it gave some."""
        if isinstance(request.prompt, TextPrompts):
            return list(request.prompt.texts)
        skips = request.rules.skip_special_tokens
        return [self._tokenizer.decode(token_ids, skip_special_tokens=skips) for token_ids in all_token_ids]

    async def _refuse_endless(self, text: str, limits: Limits, param: str) -> None:
        usual = limits.context_length * _UNUSUAL_CHARACTERS_PER_TOKEN
        if len(text) <= usual:
            return
        (beginning,) = await self._batch.encode((text[:usual],))
        if len(beginning) > limits.context_length or len(text) > limits.context_length * _MOST_CHARACTERS_PER_TOKEN:
            raise RequestError(
                f"{_maximum(limits)}; the prompt has {len(text)} characters, of which the first {usual} alone are "
                f"{len(beginning)} tokens. Shorten the prompt",
                param,
                "context_length_exceeded",
            )

    def _prompt(self, request: ParsedRequest, token_ids: list[int], limits: Limits) -> Prompt:
        param = request.prompt_param
        if not token_ids:
            raise RequestError(f"{param} has no tokens: send at least one character of this vocabulary", param)
        max_tokens = decide_max_tokens(request, len(token_ids), limits)
        sampling = request.sampling
        if sampling.min_tokens > max_tokens:
            raise RequestError(f"min_tokens {sampling.min_tokens} is more than max_tokens {max_tokens}", "min_tokens")
        end_tokens = () if sampling.ignore_eos else self.eos_token_ids
        stop_token_ids = tuple(dict.fromkeys((*end_tokens, *sampling.stop_token_ids)))
        return Prompt(
            token_ids, msgspec.structs.replace(sampling, max_tokens=max_tokens, stop_token_ids=stop_token_ids)
        )


def _render(template: ChatTemplate, prompt: ChatPrompt) -> str:
    """The prompt's text; one that continues the last message ends with the text of that message.

    Where that text ends in what the template makes of it is found by a mark behind it.
    """
    if not prompt.continue_final_message:
        return template.render_with_tools(
            prompt.messages, prompt.tools, add_generation_prompt=prompt.add_generation_prompt, **prompt.variables
        )
    *before, last = prompt.messages
    mark = secrets.token_hex(16)
    marked = [*before, last | {"content": last["content"] + mark}]
    rendered = template.render_with_tools(marked, prompt.tools, add_generation_prompt=False, **prompt.variables)
    text, found, _ = rendered.rpartition(mark)
    if not found:
        raise RequestError("the model's chat template leaves out the message to continue", "continue_final_message")
    return text


def decide_max_tokens(request: ParsedRequest, num_prompt_tokens: int, limits: Limits) -> int:
    """Tokens to generate: what the client asks for, else the rest of the context (completions: at most 16 of it).

    Raises RequestError, code context_length_exceeded, when prompt and answer do not fit in the context or the pool.
    """
    param = request.prompt_param
    room = limits.max_tokens - num_prompt_tokens
    asked = request.max_tokens
    least = 1 if asked is None else asked  # 0: the prompt alone is told
    if num_prompt_tokens + least > limits.context_length:
        wanted = "and at least 1 must be generated" if asked is None else f"and {asked} are asked for"
        raise RequestError(
            f"{_maximum(limits)}; the prompt has {num_prompt_tokens} tokens {wanted}, together "
            f"{num_prompt_tokens + least}. Shorten the prompt or lower max_tokens",
            param if room < min(least, 1) else "max_tokens",
            "context_length_exceeded",
        )
    if least > room:
        raise RequestError(
            f"the prompt has {num_prompt_tokens} tokens and {least} are asked for, but the largest KV pool of a "
            f"decode worker holds {limits.pool_tokens} tokens. Shorten the prompt or lower max_tokens",
            param if room < min(least, 1) else "max_tokens",
            "context_length_exceeded",
        )
    if asked is not None:
        return asked
    return room if request.is_chat else min(room, DEFAULT_COMPLETION_TOKENS)


def _maximum(limits: Limits) -> str:
    """In the words that clients look for, to tell a long prompt from other mistakes."""
    return f"this model's maximum context length is {limits.context_length} tokens"
