"""The tools of a chat request: checked, and what `tool_choice` makes of them."""

import re
from collections.abc import Sequence

import msgspec

from ...core.errors import RequestError
from ...vocab.grammar_source import MAX_GRAMMAR_BYTES
from ...vocab.tool_format import Tool, ToolFormat, calls_grammar
from .fields import ChatCompletionRequest, ToolDefinition
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


def with_tool_use(
    request: ParsedRequest, fields: ChatCompletionRequest, tools: Sequence[Tool], format: ToolFormat
) -> ParsedRequest:
    """The request with what `tool_choice` asks for; a call that must come is a grammar."""
    chosen = _chosen(fields, tools)
    if not chosen:
        return request
    is_forced = fields.tool_choice not in (None, "auto")
    is_named = is_forced and fields.tool_choice != "required"
    allows_several = fields.parallel_tool_calls is not False and not is_named
    use = ToolUse(frozenset(tool.name for tool in chosen), is_forced, allows_several)
    if not is_forced:
        return msgspec.structs.replace(request, tool_use=use)
    if request.sampling.grammar or request.sampling.ignore_eos:
        other = request.grammar_param or "ignore_eos"
        raise RequestError(f"tool_choice: the answer must be a call, which {other} excludes; leave one out", other)
    index_of = {tool.name: index for index, tool in enumerate(tools)}
    located = [(tool, f"tools[{index_of[tool.name]}].function.parameters") for tool in chosen]
    grammar = calls_grammar(format, located, allows_several=allows_several)
    sampling = msgspec.structs.replace(request.sampling, grammar=grammar)
    param = located[0][1] if len(located) == 1 else "tools"
    return msgspec.structs.replace(request, tool_use=use, sampling=sampling, grammar_param=param)


def _chosen(fields: ChatCompletionRequest, tools: Sequence[Tool]) -> list[Tool]:
    """The tools that may be called."""
    choice = fields.tool_choice
    if choice is None or choice in ("auto", "none"):
        return [] if choice == "none" else list(tools)
    if isinstance(choice, str):
        if choice != "required":
            raise RequestError("tool_choice must be 'none', 'auto', 'required' or name a function", "tool_choice")
        if not tools:
            raise RequestError("tool_choice 'required' needs tools; send some", "tool_choice")
        return list(tools)
    if choice.type != "function":
        raise RequestError("tool_choice.type: only 'function' is supported", "tool_choice.type")
    chosen = [tool for tool in tools if tool.name == choice.function.name]
    if not chosen:
        raise RequestError(
            f"tool_choice: there is no tool {bounded(choice.function.name, 80)!r} among tools", "tool_choice"
        )
    return chosen
