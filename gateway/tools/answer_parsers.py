"""Which parser reads the answers of a request."""

from ...vocab.tool_format import ToolFormat
from ..deltas import PieceParser, PlainText
from ..openai.request import ParsedRequest
from .call_reader import HELD_CHARACTERS, CallRules
from .parsers import CallParser
from .reasoning import BEGIN, ReasoningParser


def answer_parser(request: ParsedRequest, format: ToolFormat, *, thinks: bool, prompt_end: str) -> PieceParser:
    """A new parser for one choice. `prompt_end`: the last few characters of the prompt, special tokens included.

    An answer that a grammar constrains begins at once: nothing in it is reasoning, nor a call that need not come.
    """
    use = request.tool_use
    is_constrained = bool(request.sampling.grammar)
    if not request.is_chat or (is_constrained and (use is None or not use.is_forced)):
        return PlainText()
    parser: PieceParser = PlainText()
    if use is not None:
        rules = CallRules(use.names, held=0 if use.is_forced else HELD_CHARACTERS)
        parser = CallParser(format, rules, None if use.allows_several else 1)
    if not thinks or is_constrained:
        return parser
    return ReasoningParser(parser, is_inside=prompt_end.rstrip().endswith(BEGIN))
