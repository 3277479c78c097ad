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
from .grammar_source import json_object_grammar

_MOST_MEMORY = 256 * 1024**2  # bytes of address space that one grammar may take beyond what the process has
_WALL_FACTOR = 5  # a busy machine is no fault of the grammar
_TOO_COMPLEX = "it is too complex: it takes too long to compile, or too much memory. Simplify it"


class CheckerConfig(msgspec.Struct, frozen=True):
    """As GrammarCompiler has them; `time_limit_s`: of a processor, for one grammar."""

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
    compiler.check(json_object_grammar())  # what it builds at first use, all forks have
    _answer(answers, None)
    fork = _Fork(compiler, config.time_limit_s)
    while line := lines.readline():
        _answer(answers, fork.check(msgspec.json.decode(line, type=str)))
        fork = _Fork(compiler, config.time_limit_s)  # ready before it is needed: to fork takes longer than to compile


def _answer(answers: BinaryIO, error: str | None) -> None:
    answers.write(msgspec.json.encode(error) + b"\n")
    answers.flush()


class _Fork:
    """A copy of this process that compiles one grammar and ends; it waits for it on a pipe."""

    def __init__(self, compiler: GrammarCompiler, time_limit_s: float):
        grammar_end, self._grammar = os.pipe()
        self._result, result_end = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._grammar)
            os.close(self._result)
            _compile(compiler, grammar_end, time_limit_s, result_end)
        os.close(grammar_end)
        os.close(result_end)

    def check(self, grammar: str) -> str | None:
        with open(self._grammar, "wb") as pipe:
            pipe.write(grammar.encode())
        with open(self._result, "rb") as pipe:
            result = pipe.read()
        os.waitpid(self._pid, 0)
        return msgspec.json.decode(result, type=str | None) if result else _TOO_COMPLEX


def _compile(compiler: GrammarCompiler, grammar_end: int, time_limit_s: float, result_end: int) -> None:
    """In the fork: never returns. Out of time or memory it is ended from outside Python, and has written nothing."""
    try:
        _limit_memory()
        with open(grammar_end, "rb") as pipe:
            grammar = pipe.read().decode()
        if grammar:  # else the process that forked it is gone
            for ending in (signal.SIGPROF, signal.SIGALRM):
                signal.signal(ending, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_PROF, time_limit_s)
            signal.setitimer(signal.ITIMER_REAL, _WALL_FACTOR * time_limit_s)
            os.write(result_end, msgspec.json.encode(compiler.check(grammar)))
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
