"""Kills a gateway's batch runner at every step it takes on disk, and looks at what the next one makes of the rest.

Run as a script: each life is a forked process that ends by itself, as if killed, at one statement to the database or
one operation on a file. Prints JSON: how many lives there were, and what was wrong.
"""

import asyncio
import json
import os
import sqlite3
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from baton.core.errors import RequestError
from baton.gateway.batches import database as database_module
from baton.gateway.batches.batch_table import new_batch_id
from baton.gateway.batches.database import Database, Tables
from baton.gateway.batches.objects import Batch, FileObject, Purpose
from baton.gateway.batches.runner import BatchRunner

CHAT = "/v1/chat/completions"
NUM_LINES, WRONG_LINE = 5, 3
KILLED = 9
FILE_ID = "file-input"


class Answerer:
    """Answers with the body; refuses one line."""

    async def answer(self, endpoint: str, owner: str, request_id: str, body: bytes) -> bytes:
        await asyncio.sleep(0)
        if json.loads(body)["n"] == WRONG_LINE:
            raise RequestError("wrong")
        return body


class Doom:
    """The process ends at the `at`-th step on disk; 0: never."""

    def __init__(self, at: int, folder: Path):
        self._at, self._folder = at, str(folder)
        self.count = 0
        real_connect = database_module._connect

        def connect(path: Path) -> sqlite3.Connection:
            connection = real_connect(path)
            connection.set_trace_callback(self._step)
            return connection

        database_module._connect = connect
        sys.addaudithook(self._audit)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event in ("open", "os.rename", "os.remove") and str(args[0]).startswith(self._folder):
            self._step(event)

    def _step(self, what: str) -> None:
        self.count += 1
        if self.count == self._at:
            os._exit(KILLED)


def prepare(folder: Path) -> str:
    """A file and a batch that nobody has begun."""
    lines = [{"custom_id": f"c{n}", "method": "POST", "url": CHAT, "body": {"n": n}} for n in range(NUM_LINES)]
    tables = Tables(folder)
    with tables.files.new_draft(FILE_ID) as draft:
        draft.write("".join(json.dumps(line) + "\n" for line in lines).encode())
    now = time.time()
    tables.keep("me", FileObject(FILE_ID, 0, int(now), "x", Purpose.BATCH))
    batch = Batch(
        id=new_batch_id(),
        endpoint=CHAT,
        model="m",
        input_file_id=FILE_ID,
        completion_window="24h",
        created_at=int(now),
        expires_at=int(now) + 3600,
    )
    tables.batches.add("me", batch)
    tables.close()
    return batch.id


async def live(folder: Path) -> None:
    """One life of a runner: everything there is to do."""
    database, answerer = Database(folder), Answerer()
    runner = BatchRunner(database, answerer, 10_000, lambda model: None)  # type: ignore[arg-type]
    await runner.resume()
    async with asyncio.timeout(20):
        while runner._batches:
            await asyncio.wait(list(runner._batches.values()))
    database.close()


def in_child(folder: Path, at: int) -> int:
    """The exit code of a life that ends at step `at`."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            Doom(at, folder)
            asyncio.run(live(folder))
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def faults(folder: Path, batch_id: str) -> list[str]:
    """What is not as it has to be when all is done."""
    tables = Tables(folder)
    batch = tables.batches.known(batch_id)
    counts = batch.request_counts
    texts = {
        name: tables.files.path(file_id).read_text().splitlines() if file_id else []
        for name, file_id in (("output", batch.output_file_id), ("error", batch.error_file_id))
    }
    ids = {name: [json.loads(line)["custom_id"] for line in lines] for name, lines in texts.items()}
    on_disk = Counter(path.name for path in (folder / "files").iterdir())
    checks = {
        f"status {batch.status}": batch.status == "completed",
        f"output {ids}": ids["output"] == [f"c{n}" for n in range(NUM_LINES) if n != WRONG_LINE],
        f"error {ids}": ids["error"] == [f"c{WRONG_LINE}"],
        f"counts {counts}": (counts.total, counts.completed, counts.failed) == (NUM_LINES, NUM_LINES - 1, 1),
        f"files {on_disk}": set(on_disk) == {FILE_ID, batch.output_file_id, batch.error_file_id},
        "lines are left": not tables.lines.pending(batch_id, 0, 1),
    }
    tables.close()
    return [what for what, is_good in checks.items() if not is_good]


def main(base: Path) -> None:
    wrong: dict[str, Any] = {}
    at = 0
    while True:
        at += 1
        folder = base / str(at)
        batch_id = prepare(folder)
        code = in_child(folder, at)
        if code not in (0, KILLED):
            wrong[f"step {at}"] = f"exit code {code}"
        # The next life is killed somewhere too, the last one is not.
        for again in (1 + at * 7 % 40, 0) if code == KILLED else ():
            if (rest := in_child(folder, again)) not in (0, KILLED):
                wrong[f"step {at}, again {again}"] = f"exit code {rest}"
        if found := faults(folder, batch_id):
            wrong[f"step {at}"] = found
        if code != KILLED:
            break
    print(json.dumps({"lives": at, "wrong": wrong}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
