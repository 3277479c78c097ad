"""Rewrite the module tables of docs/structure.md from the first line of each module's docstring.

Everything above the marker line is written by hand and stays. Run it after adding, renaming or removing a module:
`python scripts/write_structure.py`; tests/test_house.py fails when the map and the house differ.
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MARKER = "<!-- below: written by scripts/write_structure.py -->"
ROOM_ROW = re.compile(r"^\| `([a-z_]+)/` \|", flags=re.MULTILINE)


def first_line(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    if not docstring:
        sys.exit(f"{path} has no docstring: its first line is what the map says about it")
    return docstring.splitlines()[0].replace("|", "\\|")


def room_section(room: str) -> str:
    folder = ROOT / room
    modules = sorted(path for path in folder.rglob("*.py") if path.name != "__init__.py")
    rows = [f"| `{path.relative_to(folder).as_posix()}` | {first_line(path)} |" for path in modules]
    return "\n".join([f"### `{room}/`", "", "| module | what it is |", "|---|---|", *rows, ""])


def main() -> None:
    document = ROOT / "docs" / "structure.md"
    hand_written = document.read_text().partition(MARKER)[0]
    sections = [room_section(room) for room in ROOM_ROW.findall(hand_written)]
    document.write_text(f"{hand_written}{MARKER}\n\n" + "\n".join(sections))


if __name__ == "__main__":
    main()
