"""Pages of lists (files, batches, input items of responses): `limit`, `after`, `order`."""

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..core.errors import RequestError

MOST_FILES, MOST_BATCHES, MOST_ITEMS = 10_000, 100, 100  # on a page
_LONGEST_NUMBER = 6


class Page(msgspec.Struct, frozen=True):
    """`after`: the id of the last one of the page before. Newest first, or oldest first."""

    limit: int
    after: str | None = None
    is_newest_first: bool = True


def parse_page(query: Mapping[str, str], default: int, most: int) -> Page:
    """From the query of a URL. Raises RequestError (400) naming the field."""
    text = query.get("limit", str(default))
    limit = int(text) if text.isascii() and text.isdigit() and len(text) <= _LONGEST_NUMBER else 0
    if not 1 <= limit <= most:
        raise RequestError(f"limit must be a whole number from 1 to {most}", "limit")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError("order must be asc or desc", "order")
    return Page(limit, query.get("after") or None, order == "desc")


def page_of(
    connection: sqlite3.Connection,
    table: str,
    conditions: Sequence[str],
    values: Sequence[Any],
    page: Page,
    columns: str = "document",
) -> tuple[list[tuple[Any, ...]], bool]:
    """Rows of one page, and whether there are more. Everything but `values` is ours: clients write no SQL.

    Raises RequestError (400) when `after` is none of those that meet the conditions.
    """
    where, values = " AND ".join(conditions), list(values)
    if page.after is not None:
        row = connection.execute(f"SELECT seq FROM {table} WHERE id = ? AND {where}", (page.after, *values)).fetchone()
        if row is None:
            raise RequestError("after: no such object is in this list; take an id that was listed", "after")
        where += f" AND seq {'<' if page.is_newest_first else '>'} ?"
        values.append(row[0])
    order = "DESC" if page.is_newest_first else "ASC"
    rows = connection.execute(
        f"SELECT {columns} FROM {table} WHERE {where} ORDER BY seq {order} LIMIT ?", (*values, page.limit + 1)
    ).fetchall()
    return rows[: page.limit], len(rows) > page.limit
