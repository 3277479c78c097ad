"""The tools of a chat request: checked, and what `tool_choice` makes of them."""

import re
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ...core.errors import RequestError
from ...vocab.grammar_source import MAX_GRAMMAR_BYTES
from ...vocab.tool_format import Tool, ToolFormat, calls_grammar
from .fields import AllowedTools, ChatCompletionRequest, ChosenTools, NamedTool, ToolDefinition
from .json_errors import bounded
from .request import ParsedRequest, ToolUse

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def checked_tools(definitions: Sequence[ToolDefinition]) -> list[Tool]:
    """Raises RequestError naming the tool that is wrong."""
    if len(definitions) > MAX_TOOLS:
        raise RequestError(f"tools has {len(definitions)} entries; at most {MAX_TOOLS} are allowed", "tools")
    tools: dict[str, Tool] = {}
    for index, definition in enumerate(definitions):
        at, function = f"tools[{index}]", definition.function
        if definition.type != "function":
            raise RequestError(f"{at}.type: only 'function' is supported", f"{at}.type")
        if function is None:
            raise RequestError(f"{at}.function is missing", f"{at}.function")
        if not _NAME.fullmatch(function.name):
            raise RequestError(
                f"{at}.function.name must be 1 to 64 letters, digits, '_', '-' or '.'", f"{at}.function.name"
            )
        if function.name in tools:
            raise RequestError(
                f"{at}.function.name: there are two tools {bounded(function.name, 80)!r}", f"{at}.function.name"
            )
        tools[function.name] = Tool(function.name, function.description, function.parameters)
    if tools and len(msgspec.json.encode(list(tools.values()))) > MAX_GRAMMAR_BYTES:
        raise RequestError(f"tools are larger than {MAX_GRAMMAR_BYTES:,} bytes; describe less", "tools")
    return list(tools.values())


class _Choice(NamedTuple):
    """Which tools may be called, whether a call must come, and whether more than one may."""

    tools: Sequence[Tool]
    is_forced: bool = False
    allows_several: bool = True


def with_tool_use(
    request: ParsedRequest, fields: ChatCompletionRequest, tools: Sequence[Tool], format: ToolFormat
) -> ParsedRequest:
    """The request with what `tool_choice` asks for; a call that must come is a grammar."""
    choice = _choice(fields.tool_choice, tools)
    if not choice.tools:
        return request
    allows_several = choice.allows_several and fields.parallel_tool_calls is not False
    use = ToolUse(frozenset(tool.name for tool in choice.tools), choice.is_forced, allows_several)
    if not choice.is_forced:
        return msgspec.structs.replace(request, tool_use=use)
    if request.sampling.grammar or request.sampling.ignore_eos:
        other = request.grammar_param or "ignore_eos"
        raise RequestError(f"tool_choice: the answer must be a call, which {other} excludes; leave one out", other)
    index_of = {tool.name: index for index, tool in enumerate(tools)}
    located = [(tool, f"tools[{index_of[tool.name]}].function.parameters") for tool in choice.tools]
    grammar = calls_grammar(format, located, allows_several=allows_several)
    sampling = msgspec.structs.replace(request.sampling, grammar=grammar)
    param = located[0][1] if len(located) == 1 else "tools"
    return msgspec.structs.replace(request, tool_use=use, sampling=sampling, grammar_param=param)


def _choice(choice: str | ChosenTools | None, tools: Sequence[Tool]) -> _Choice:
    if choice is None or choice == "auto":
        return _Choice(tools)
    if choice == "none":
        return _Choice(())
    if isinstance(choice, str):
        if choice != "required":
            raise RequestError("tool_choice must be 'none', 'auto', 'required' or name a function", "tool_choice")
        if not tools:
            raise RequestError("tool_choice 'required' needs tools; send some", "tool_choice")
        return _Choice(tools, is_forced=True)
    if choice.type == "allowed_tools":
        return _allowed(choice.allowed_tools, tools)
    return _Choice([_named(choice, "tool_choice", tools)], is_forced=True, allows_several=False)


def _allowed(allowed: AllowedTools | None, tools: Sequence[Tool]) -> _Choice:
    """In the order of `tools`, in which the model is told of them."""
    at = "tool_choice.allowed_tools"
    if allowed is None:
        raise RequestError(f"{at} is missing", at)
    if allowed.mode not in ("auto", "required"):
        raise RequestError(f"{at}.mode must be 'auto' or 'required'", f"{at}.mode")
    if not allowed.tools:
        raise RequestError(f"{at}.tools is empty; with tool_choice 'none' no tool may be called", f"{at}.tools")
    named = [_named(tool, f"{at}.tools[{index}]", tools) for index, tool in enumerate(allowed.tools)]
    return _Choice([tool for tool in tools if tool in named], is_forced=allowed.mode == "required")


def _named(named: NamedTool, at: str, tools: Sequence[Tool]) -> Tool:
    """The tool of that name. Raises RequestError; `at` is where it is named."""
    if named.type != "function":
        raise RequestError(f"{at}.type: {bounded(named.type, 80)!r} is not supported", f"{at}.type")
    if named.function is None:
        raise RequestError(f"{at}.function is missing", f"{at}.function")
    for tool in tools:
        if tool.name == named.function.name:
            return tool
    raise RequestError(f"{at}: there is no tool {bounded(named.function.name, 80)!r} among tools", at)
