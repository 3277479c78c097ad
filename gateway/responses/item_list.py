"""The input items of a stored response: their ids, and how they are listed."""

from collections.abc import Sequence

import msgspec

from ...core.errors import RequestError
from ..openai.json_errors import bounded
from ..paging import Page
from .answers import (
    FunctionCallItem,
    FunctionCallOutputItem,
    InputItemList,
    InputText,
    ListedItem,
    ListedMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
)
from .fields import InputItem, InputPart

_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def with_ids(items: Sequence[InputItem], response_id: str) -> list[InputItem]:
    """Those without an id get one of their own; `response_id` is theirs whose input they are."""
    suffix = response_id.partition("_")[2]
    return [
        item if item.id else msgspec.structs.replace(item, id=f"{_PREFIXES[item.type]}_{suffix}_i{number}")
        for number, item in enumerate(items)
    ]


def listed(items: Sequence[InputItem], page: Page) -> InputItemList:
    """One page of `items`, which are in the order of the conversation. Raises RequestError for an unknown `after`."""
    ordered = [_listed(item) for item in items]
    if page.is_newest_first:
        ordered.reverse()
    start = 0
    if page.after is not None:
        numbers = [number for number, item in enumerate(ordered) if item.id == page.after]
        if not numbers:
            raise RequestError(f"after: {bounded(page.after, 80)!r} is not in this list; take an id from it", "after")
        start = numbers[0] + 1
    shown = ordered[start : start + page.limit]
    ends = (shown[0].id, shown[-1].id) if shown else (None, None)
    return InputItemList(shown, start + page.limit < len(ordered), *ends)


def _listed(item: InputItem) -> ListedItem:
    """`item` has been answered, so it is a valid one."""
    item_id = item.id or ""
    match item.type:
        case "function_call":
            return FunctionCallItem(item_id, "completed", item.call_id or "", item.name or "", item.arguments or "")
        case "function_call_output":
            return FunctionCallOutputItem(item_id, item.call_id or "", "\n".join(_texts(item.output)))
        case "reasoning":
            parts = item.content if item.content is not None else item.summary
            return ReasoningItem(item_id, "completed", [ReasoningText(text) for text in _texts(parts)])
    kind: type[OutputText | InputText] = OutputText if item.role == "assistant" else InputText
    return ListedMessage(item_id, item.role or "", [kind(text) for text in _texts(item.content)])


def _texts(content: str | Sequence[InputPart] | None) -> list[str]:
    if content is None or isinstance(content, str):
        return [content or ""]
    return [part.text or part.refusal or "" for part in content]
