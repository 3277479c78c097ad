"""The JSON that clients send: the bodies of all endpoints. /openapi.json is made of the same structs.

Types and ranges are checked by the decoder, the rest in `parser.py`. None is the same as absent. A field that is not
here is ignored. One of type `Refused` is known and cannot be honoured; any value but its neutral ones is refused
(`refused.py`), because to ignore it would give another answer than was asked for.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ..urgency import PRIORITIES

MAX_CHOICES = 128
MAX_COMPLETION_LOGPROBS = 5
MAX_CHAT_LOGPROBS = 20

REFUSED = "Known, and not supported: only values that ask for nothing pass."
Refused = Annotated[Any, Meta(description=REFUSED)]

TokenIds = list[Annotated[int, Meta(ge=0)]]
_Bias = Annotated[float, Meta(ge=-100, le=100)]
_PromptText = {"type": "string", "minLength": 1}
_PromptIds = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_Prompt = Annotated[
    Any,
    Meta(
        description="A text, texts, token ids, or lists of token ids.",
        extra_json_schema={
            "anyOf": [
                _PromptText,
                {"type": "array", "minItems": 1, "items": _PromptText},
                _PromptIds,
                {"type": "array", "minItems": 1, "items": _PromptIds},
            ]
        },
    ),
]


# Which words there are is checked by the parser, whose errors say more than the decoder's.
_Role = Annotated[str, Meta(extra_json_schema={"enum": ["system", "developer", "user", "assistant", "tool"]})]
_FormatType = Annotated[str, Meta(extra_json_schema={"enum": ["text", "json_object", "json_schema"]})]
_Function = Annotated[str, Meta(extra_json_schema={"enum": ["function"]})]
_PartType = Annotated[str, Meta(extra_json_schema={"enum": ["text"]})]
_AllowedMode = Annotated[str, Meta(extra_json_schema={"enum": ["auto", "required"]})]
_ChosenType = Annotated[str, Meta(extra_json_schema={"enum": ["function", "allowed_tools"]})]
_ToolChoice = Annotated[str, Meta(extra_json_schema={"enum": ["none", "auto", "required"]})]


class StreamOptions(msgspec.Struct):
    """`include_usage`: one more chunk at the end. `continuous_usage_stats`: counts so far with every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(msgspec.Struct):
    """`strict` makes no difference: a schema is always enforced, or refused."""

    schema: dict[str, Any] | bool | None = None
    name: Annotated[str, Meta(max_length=256)] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    """`type`: text, json_object or json_schema."""

    type: _FormatType
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct):
    """One of these; as vLLM has them. `json`: a schema, as an object or as text."""

    json: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Refused = None
    whitespace_pattern: Refused = None


class CommonFields(msgspec.Struct, kw_only=True):
    """Fields of completions and chat."""

    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: int | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: dict[str, _Bias] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    priority: Annotated[int, Meta(ge=PRIORITIES[0], le=PRIORITIES[1])] | None = None
    service_tier: str | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    add_special_tokens: bool | None = None

    # What the answer must look like: at most one of these. The grammars are Lark's, in llguidance's dialect.
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    grammar: str | None = None

    prompt_logprobs: Refused = None
    length_penalty: Refused = None
    use_beam_search: Refused = None
    bad_words: Refused = None
    allowed_token_ids: Refused = None
    truncate_prompt_tokens: Refused = None
    return_tokens_as_token_ids: Refused = None
    prompt_embeds: Refused = None
    functions: Refused = None
    function_call: Refused = None
    modalities: Refused = None
    audio: Refused = None
    guided_decoding_backend: Refused = None
    guided_whitespace_pattern: Refused = None
    chat_template: Refused = None


class CompletionRequest(CommonFields, kw_only=True):
    """POST /v1/completions."""

    prompt: _Prompt
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_COMPLETION_LOGPROBS)] | None = None

    suffix: Refused = None
    tools: Refused = None
    tool_choice: Refused = None
    parallel_tool_calls: Refused = None
    chat_template_kwargs: Refused = None
    continue_final_message: Refused = None
    add_generation_prompt: Refused = None


class ContentPart(msgspec.Struct):
    type: _PartType
    text: str | None = None


class CalledFunction(msgspec.Struct):
    """`arguments`: a JSON object, as text or as it is."""

    name: str
    arguments: str | dict[str, Any] = ""


class MessageToolCall(msgspec.Struct):
    function: CalledFunction
    id: str | None = None
    type: _Function = "function"


class ChatMessage(msgspec.Struct):
    role: _Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    function_call: Refused = None
    audio: Refused = None


class FunctionDefinition(msgspec.Struct):
    """`strict` makes no difference: arguments are constrained whenever a call is required."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(msgspec.Struct):
    """Tools of another type have no `function`: the parser says that they are not supported."""

    function: FunctionDefinition | None = None
    type: _Function = "function"


class NamedFunction(msgspec.Struct):
    name: str


class NamedTool(msgspec.Struct):
    function: NamedFunction | None = None
    type: _Function = "function"


class AllowedTools(msgspec.Struct):
    """All tools are told to the model, these may be called. `mode`: auto, or required: one of them must be."""

    mode: _AllowedMode
    tools: list[NamedTool]


class ChosenTools(NamedTool):
    """One function, or with type `allowed_tools` some of them."""

    type: _ChosenType = "function"
    allowed_tools: AllowedTools | None = None


class ChatCompletionRequest(CommonFields, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_CHAT_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: _ToolChoice | ChosenTools | None = None
    parallel_tool_calls: bool | None = None

    best_of: Refused = None
    echo: Refused = None
    suffix: Refused = None
    documents: Refused = None
    web_search_options: Refused = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize: a text, or messages as in chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ToolDefinition] | None = None

    chat_template: Refused = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: TokenIds
    model: str | None = None
