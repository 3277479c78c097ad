"""Grammars: compiled in a thread, beside the steps of others, before their requests may join the batch."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..core.errors import BatonError
from ..core.queueing import Waiting
from ..vocab.grammar import GrammarCompiler
from ..worker.workbench import Workbench
from .constraint import Constraint, Words, fill_masks
from .entry import DecodeEntry

logger = logging.getLogger(__name__)

# How long an idle worker waits at a time: the compiler wants the processor more than the loop does.
_IDLE_WAIT_S = 0.001


def compiler_of(bench: Workbench) -> GrammarCompiler:
    """Takes about a second."""
    model = bench.engine.model_config
    return GrammarCompiler(Path(bench.config.engine.model_folder), model.vocab_size, model.eos_token_ids)


@dataclass(frozen=True)
class Compiled:
    """What became of a request that waited: its choices have their constraints, or `error` says why not."""

    entries: Sequence[DecodeEntry]  # the first one leads
    place: Waiting
    error: str


class Grammars:
    """`make_compiler` is called in the thread, when the first grammar comes; a server without any does not pay."""

    def __init__(self, make_compiler: Callable[[], GrammarCompiler], eos_token_ids: Sequence[int]):
        self._make_compiler = make_compiler
        self._eos_token_ids = tuple(eos_token_ids)
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        self._waiting: list[tuple[Sequence[DecodeEntry], Waiting, Future[list[Constraint]]]] = []

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        return self._make_compiler()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def start(self, entries: Sequence[DecodeEntry], place: Waiting) -> None:
        """Compile the grammar of a request and take it to where its answers are; see `take_compiled`."""
        self._waiting.append((entries, place, self._threads.submit(self._compile, entries)))

    def _compile(self, entries: Sequence[DecodeEntry]) -> list[Constraint]:
        """Once, however many choices there are: one grammar may take most of a second. All are at the same place."""
        request = entries[0].request
        matcher = self._compiler.matcher(request.sampling.grammar)
        for token_id in request.output_token_ids:
            matcher.advance(token_id)
        ends = {*request.sampling.stop_token_ids, *self._eos_token_ids}
        matchers = [matcher, *(matcher.copy() for _ in entries[1:])]
        return [Constraint(matcher, ends, self._compiler.mask_words) for matcher in matchers]

    def take_compiled(self) -> list[Compiled]:
        """Those that are done since the last call, in the order they came. Some may have ended since."""
        waiting, self._waiting = self._waiting, []
        compiled = []
        for entries, place, future in waiting:
            if future.done():
                compiled.append(Compiled(entries, place, _hand_out(entries, future)))
            else:
                self._waiting.append((entries, place, future))
        return compiled

    def wait_briefly(self) -> bool:
        """The worker has nothing else to do. True: there is something to wait for."""
        wait([future for _, _, future in self._waiting], timeout=_IDLE_WAIT_S)
        return bool(self._waiting)

    def masks(self, entries: Sequence[DecodeEntry]) -> list[Words | None]:
        """For each entry what may come next, None without a grammar; while the device computes their logits."""
        constrained = [(e.constraint, e.may_end) for e in entries if e.constraint is not None]
        if not constrained:
            return [None] * len(entries)
        rows = iter(fill_masks(self._compiler, constrained))
        return [None if entry.constraint is None else next(rows) for entry in entries]


def _hand_out(entries: Sequence[DecodeEntry], future: Future[list[Constraint]]) -> str:
    try:
        constraints = future.result()
    except BatonError as error:
        return str(error)
    except Exception:  # a fault of the compiler must not cost the others their worker
        logger.exception("a grammar could not be compiled")
        return "the grammar could not be compiled; the worker's log has the reason"
    for entry, constraint in zip(entries, constraints, strict=True):
        entry.constraint = constraint
    return ""
