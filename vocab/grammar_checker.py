"""A process of its own that says whether grammars compile: some take minutes, and nothing stops Rust in a thread.

Started as `python -m baton.vocab.grammar_checker`. A line of JSON in, a line of JSON out: first CheckerConfig, answered
with `null` when the tokenizer is loaded (else with why not, and the end), then grammars (strings), each answered with
why it cannot be used, or `null`.
Each is compiled in a fork, which ends by itself when its time is over. The process ends when its input does.
"""

import os
import resource
import signal
import sys
from pathlib import Path
from typing import BinaryIO

import msgspec

from ..core.errors import ConfigurationError
from .grammar import GrammarCompiler

_MOST_MEMORY = 1024**3  # bytes of address space that one grammar may take beyond what the process has
_TOO_COMPLEX = "it is too complex: it takes too long to compile, or too much memory. Simplify it"


class CheckerConfig(msgspec.Struct, frozen=True):
    """As GrammarCompiler has them; `time_limit_s` is for one grammar."""

    model_folder: str
    vocab_size: int
    eos_token_ids: list[int]
    time_limit_s: float


def main(lines: BinaryIO, answers: BinaryIO) -> None:
    config = msgspec.json.decode(lines.readline(), type=CheckerConfig)
    try:
        compiler = GrammarCompiler(Path(config.model_folder), config.vocab_size, config.eos_token_ids)
    except ConfigurationError as error:
        _answer(answers, str(error))
        return
    _answer(answers, None)
    while line := lines.readline():
        _answer(answers, _check(compiler, msgspec.json.decode(line, type=str), config.time_limit_s))


def _answer(answers: BinaryIO, error: str | None) -> None:
    answers.write(msgspec.json.encode(error) + b"\n")
    answers.flush()


def _check(compiler: GrammarCompiler, grammar: str, time_limit_s: float) -> str | None:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _compile(compiler, grammar, time_limit_s, writing)
    os.close(writing)
    with open(reading, "rb") as pipe:
        result = pipe.read()
    os.waitpid(pid, 0)
    return msgspec.json.decode(result, type=str | None) if result else _TOO_COMPLEX


def _compile(compiler: GrammarCompiler, grammar: str, time_limit_s: float, writing: int) -> None:
    """In the fork: never returns. Out of time or memory it is ended from outside Python, and has written nothing."""
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, time_limit_s)
        _limit_memory()
        os.write(writing, msgspec.json.encode(compiler.check(grammar)))
    finally:
        os._exit(0)


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # Rust aborts when memory is refused
    statm = Path("/proc/self/statm")
    if statm.exists():  # elsewhere the time limit has to do
        most = int(statm.read_text().split()[0]) * resource.getpagesize() + _MOST_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
