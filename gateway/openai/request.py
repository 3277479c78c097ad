"""ParsedRequest: what a client asks for, every field valid by itself, and frozen."""

from typing import Any

import msgspec

from ...core.request import SamplingParams


class TextPrompts(msgspec.Struct, frozen=True):
    """Texts, in the client's order."""

    texts: tuple[str, ...]
    add_special_tokens: bool = True

    @property
    def num_prompts(self) -> int:
        return len(self.texts)


class TokenPrompts(msgspec.Struct, frozen=True):
    """Token ids below the width of the logits, in the client's order."""

    token_ids: tuple[list[int], ...]

    @property
    def num_prompts(self) -> int:
        return len(self.token_ids)


class ChatPrompt(msgspec.Struct, frozen=True):
    """Messages and tools as chat templates expect them, and what else the template is given.

    `continue_final_message`: the prompt ends with the last message's own text, which the answer goes on with.
    """

    messages: tuple[dict[str, Any], ...]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: dict[str, Any] = {}
    tools: tuple[dict[str, Any], ...] = ()
    add_special_tokens: bool = False  # a chat template writes them itself


PromptSource = TextPrompts | TokenPrompts | ChatPrompt


class TextRules(msgspec.Struct, frozen=True):
    """How the tokens of a choice become its text. `include_stop`: what ended it is a part of the text."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True


class ToolUse(msgspec.Struct, frozen=True):
    """Which tools may be called. `is_forced`: the answer is nothing but calls, and a grammar sees to it."""

    names: frozenset[str]
    is_forced: bool
    allows_several: bool


class ParsedRequest(msgspec.Struct, frozen=True):
    """`grammar_param`: the field that `sampling.grammar` was made of. `tool_use`: None when no tool may be called.

    `max_tokens` is None when the client did not say; `sampling.max_tokens` is decided when the prompt's length is
    known. `sampling.stop_token_ids` holds only what the client asked for. `service_tier` is what the answer says.

    Each prompt is continued `num_sampled` times; of these the `num_choices` likeliest are told. `echo`: every choice
    begins with its prompt. `tells_logprobs`: the answer holds log-probabilities. `continuous_usage`: token counts
    with every chunk.
    """

    prompt: PromptSource
    sampling: SamplingParams
    max_tokens: int | None
    rules: TextRules = TextRules()
    num_choices: int = 1
    num_sampled: int = 1
    echo: bool = False
    tells_logprobs: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    priority: int = 0
    service_tier: str | None = None
    cache_salt: str | None = None
    grammar_param: str = ""
    tool_use: ToolUse | None = None

    @property
    def is_chat(self) -> bool:
        return isinstance(self.prompt, ChatPrompt)

    @property
    def prompt_param(self) -> str:
        """The field the prompt came in."""
        return "messages" if self.is_chat else "prompt"

    @property
    def num_prompt_logprobs(self) -> int | None:
        """As in core's Request."""
        return self.sampling.num_logprobs if self.echo and self.tells_logprobs else None
