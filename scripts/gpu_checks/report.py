"""What the stages report: rows of one table, and the JSON they are kept in. Pure."""

import json
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One line. `ok`: True passed or goal met, False not, None: a figure without a verdict."""

    stage: str
    name: str
    value: str
    beside: str = ""  # the floor, the goal, the other implementation
    ok: bool | None = None
    data: dict[str, object] = field(default_factory=dict)

    def line(self) -> str:
        mark = {True: "ok", False: "NO", None: ""}[self.ok]
        return f"{self.stage:<12}{self.name:<58}{mark:<3}{self.value:<24} {self.beside}"[:150].rstrip()


class Report:
    """Rows as they come, printed at once. Stages end in time. `goals`: (stage, name) of what needs a verdict."""

    def __init__(self, minutes: float, clock: Callable[[], float] = time.monotonic, echo: bool = True):
        self.rows: list[Row] = []
        self.goals: list[tuple[str, str]] = []
        self._clock = clock
        self._echo = echo
        self._started = clock()
        self._ends = self._started + 60 * minutes

    @property
    def seconds_left(self) -> float:
        return self._ends - self._clock()

    def add(self, row: Row) -> None:
        self.rows.append(row)
        if self._echo:
            print(row.line(), flush=True)

    def stage(self, name: str, needs_s: float, work: Callable[[], None]) -> None:
        """Run `work` if `needs_s` seconds are left. Its failure is a row, and the next stage goes on."""
        if self.seconds_left < needs_s:
            left = f"{self.seconds_left:.0f} s left, {needs_s:.0f} s needed"
            self.add(Row(name, "skipped", "no time", left, None, {"skipped": True}))
            return
        started = self._clock()
        try:
            work()
        except Exception as error:  # whatever it is, the other stages have something to say
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            self.add(Row(name, text, "failed", "", False, {"traceback": traceback.format_exc()}))
        took = self._clock() - started
        self.add(Row(name, "stage ended", f"{took:.1f} s", f"{self.seconds_left:.0f} s left", None, {"seconds": took}))

    @property
    def num_failed(self) -> int:
        return sum(row.ok is False for row in self.rows)

    @property
    def not_judged(self) -> list[str]:
        """Goals without a verdict, whatever the reason: no time, no profile, another transport, a stage that failed."""
        judged = {(row.stage, row.name) for row in self.rows if row.ok is not None}
        return [f"{stage}: {name}" for stage, name in self.goals if (stage, name) not in judged]

    def write(self, path: Path, facts: dict[str, object]) -> None:
        content: dict[str, object] = {"facts": facts, "seconds": self._clock() - self._started}
        content |= {"not_judged": self.not_judged, "rows": [asdict(row) for row in self.rows]}
        path.write_text(json.dumps(content, indent=1, default=str) + "\n")
