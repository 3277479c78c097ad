"""What a step gives to the device: forward pass, sampling and scoring, and which of its rows are for whom."""

import torch
from torch import Tensor

from ..core.sequence import Sequence
from ..engine.forward_batch import Chunk, build_forward_batch
from ..engine.launched import LaunchedTokens
from ..engine.scoring import launch_scores
from ..worker.workbench import Workbench
from .entry import DecodeEntry
from .grammars import Grammars
from .launched_step import LaunchedScores, LaunchedStep


class StepLauncher:
    def __init__(self, bench: Workbench, grammars: Grammars):
        self._bench = bench
        self._grammars = grammars

    def first_tokens(self, complete: list[tuple[DecodeEntry, Tensor]], number: int) -> LaunchedStep:
        """Of those whose prompt's KV is in their blocks, from the last hidden state `[hidden_size]` of each."""
        entries = [entry for entry, _ in complete]
        tokens = self.sample(entries, torch.stack([hidden for _, hidden in complete]))
        return LaunchedStep([], entries, tokens, self._bench.engine.runner.progress, number)

    def forward(
        self,
        parts: list[tuple[DecodeEntry, Chunk]],
        chunks: list[tuple[Sequence, int]],
        number: int,
        *,
        keeps_hidden: bool,
    ) -> LaunchedStep:
        """One pass over `parts`, whose sequences count them as launched, and a token for each that is complete now.

        `chunks`: the same as the plan says it. `keeps_hidden`: forks may wait for a prompt's last hidden state.
        """
        engine = self._bench.engine
        batch = build_forward_batch([chunk for _, chunk in parts], self._bench.info.block_size)
        hidden = engine.runner.forward(batch)
        sampled, silent, last_rows, scores, row = [], [], [], [], 0
        for entry, chunk in parts:
            if chunk.wants_every_hidden:
                scores.append(self._score(entry, chunk, hidden, row))
            row += chunk.num_hidden
            if entry.sequence.num_uncomputed_tokens > 0:
                continue
            if entry.samples_nothing:
                silent.append(entry)
            else:
                sampled.append(entry)
                last_rows.append(row - 1)
        if len(last_rows) < row:
            hidden = hidden[last_rows]
        tokens = self.sample(sampled, hidden) if sampled else None
        return LaunchedStep(
            chunks, sampled, tokens, engine.runner.progress, number, hidden if keeps_hidden else None, scores, silent
        )

    def sample(self, entries: list[DecodeEntry], hidden: Tensor) -> LaunchedTokens:
        """Start sampling one token for each entry from `hidden` `[num_entries, hidden_size]`.

        What grammars forbid is found while the device computes what it has been given.
        """
        engine = self._bench.engine
        logits = engine.runner.logits(hidden)
        rows = [e.sampling_row(mask) for e, mask in zip(entries, self._grammars.masks(entries), strict=True)]
        tokens = engine.sampler.launch(logits, rows)
        for entry in entries:
            entry.sequence.expect()
        return tokens

    def _score(self, entry: DecodeEntry, chunk: Chunk, hidden: Tensor, first: int) -> LaunchedScores:
        """A prompt's chunk; the states of its tokens are the rows of `hidden` from `first` on."""
        engine, scores = self._bench.engine, entry.prompt_scores
        assert scores is not None
        targets = scores.targets(chunk.start, chunk.stop)
        states, vocab_size = hidden[first : first + len(targets)], engine.model_config.vocab_size
        launched = launch_scores(engine.runner, engine.sampler, states, targets, scores.num_top, vocab_size)
        return LaunchedScores(entry, chunk.start, launched)
