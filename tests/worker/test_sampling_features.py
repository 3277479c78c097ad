"""Penalties, bias, log-probabilities and grammars in whole workers: the tokens of a plain model, whatever happens.

Faults that other servers shipped, and the tests that would catch them:

    SP09  a penalty is ignored on one path      test_everything_at_once_equals_the_plain_model (both paths)
    PD12  the first token is an end, unseen     test_pd12_an_end_as_the_first_token
    AP02  bias outside of the vocabulary        test_ap02_bias_outside_of_the_vocabulary_hurts_nobody
    SC09  a grammar that hangs                  test_sc09_* here
"""

import math
import threading
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from baton.core.messages import Role
from baton.core.request import FinishReason, SamplingParams
from baton.decode.grammars import Grammars
from baton.kernels import reference
from baton.kernels.reference.sampling import SamplingRule
from baton.vocab.grammar import GrammarError

PREFILL, DECODE = Role.PREFILL, Role.DECODE
PROMPT = [(7 * i * i + 3) % 101 for i in range(23)]
VOCAB_SIZE, MODULUS, EOS = 101, 8191, 100  # of the model made by hand


# ---- the plain model -----------------------------------------------------------------------------------------------


def own_logits(token_ids: list[int]) -> torch.Tensor:
    logits = torch.zeros(VOCAB_SIZE)
    logits[sum((i + 1) * (token + 1) for i, token in enumerate(token_ids)) % MODULUS % VOCAB_SIZE] = 1.0
    return logits


def plain(prompt: list[int], params: SamplingParams, choice: int = 0) -> list[int]:
    """What a request generates, one token after the other."""
    output: list[int] = []
    steps = parse(params.grammar) if params.grammar else None
    while len(output) < params.max_tokens:
        logits = reference.apply_penalties(
            own_logits(prompt + output),
            prompt,
            output,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        for token_id, bias in params.logit_bias:
            logits[token_id] += bias
        if steps is not None:
            allowed = steps[len(output)] if len(output) < len(steps) else {EOS}
            logits[[t for t in range(VOCAB_SIZE) if t not in allowed]] = -math.inf
        elif len(output) < params.min_tokens:
            logits[list(params.stop_token_ids)] = -math.inf
        rule = SamplingRule(params.temperature, seed=params.seed, choice=choice, position=len(prompt) + len(output))
        output.append(reference.sample(logits, rule))
        if output[-1] in params.stop_token_ids or (steps is not None and output[-1] == EOS):
            break
    return output


def own_logprobs(prompt: list[int], output: list[int]) -> list[float]:
    context = prompt + output
    return [
        float(own_logits(context[:i]).double().log_softmax(0)[context[i]]) for i in range(len(prompt), len(context))
    ]


# ---- grammars made by hand: "1-5 7;9" is a token of {1..5, 7}, then 9, then the end ----------------------------------


def parse(grammar: str) -> list[set[int]]:
    steps = []
    for step in grammar.split(";"):
        ranges = [part.split("-") for part in step.split()]
        steps.append({token for ends in ranges for token in range(int(ends[0]), int(ends[-1]) + 1)})
    return steps


@dataclass
class ByHand:
    steps: list[set[int]]
    place: int = 0

    def copy(self) -> "ByHand":
        return ByHand(self.steps, self.place)

    def advance(self, token_id: int) -> None:
        if token_id not in self.allowed:
            raise GrammarError(f"token {token_id} is not in the grammar")
        self.place += 1

    def check(self) -> None: ...

    @property
    def allowed(self) -> set[int]:
        return self.steps[self.place] if self.place < len(self.steps) else {EOS}

    @property
    def is_accepting(self) -> bool:
        return self.place >= len(self.steps)


class CompilerByHand:
    """Grammars that begin with "!" cannot be compiled; those that begin with "?" take until `gate` is opened."""

    mask_words = 4

    def __init__(self, gate: threading.Event):
        self._gate = gate
        self.num_compiled = 0

    def matcher(self, grammar: str) -> ByHand:
        self.num_compiled += 1
        if grammar.startswith("?"):
            assert self._gate.wait(20)
        if grammar.startswith("!"):
            raise GrammarError("the grammar is not one")
        return ByHand(parse(grammar.removeprefix("?")))

    def fill_all(self, matchers: list[ByHand], bitmask: np.ndarray) -> None:
        for matcher, row in zip(matchers, bitmask, strict=True):
            bits = np.zeros(128, np.uint8)
            bits[list(matcher.allowed)] = 1
            row[:] = np.packbits(bits, bitorder="little").view(np.int32)


def birth_with_grammars(house, number: int = 0) -> tuple[object, threading.Event]:
    ref, gate = house.birth(DECODE, number=number), threading.Event()
    role = house.workers[ref]._roles[DECODE]
    role._grammars = role._launcher._grammars = Grammars(lambda: CompilerByHand(gate), (EOS,))
    return ref, gate


# ---- everything at once ----------------------------------------------------------------------------------------------

GRAMMAR = ";".join(["0-99"] * 5 + ["10-40", "50", "3 9 60-70", "0-20"])
KINDS: dict[str, dict] = {
    "plain": {"temperature": 0.0},
    "frequency": {"temperature": 0.0, "frequency_penalty": 2.0},
    "repetition": {"temperature": 0.6, "seed": 5, "repetition_penalty": 1.5, "presence_penalty": -0.5},
    "bias": {"temperature": 0.0, "logit_bias": ((4, 0.9), (17, 0.9), (2, -5.0)), "presence_penalty": 0.3},
    "min_tokens": {"temperature": 0.0, "stop_token_ids": tuple(range(0, 101, 2)), "min_tokens": 9},
    "logprobs": {"temperature": 0.9, "seed": 9, "num_logprobs": 2, "frequency_penalty": 0.2},
    "grammar": {"temperature": 0.8, "seed": 3, "grammar": GRAMMAR, "num_logprobs": 0},
    "grammar 2": {"temperature": 0.0, "grammar": "1-9;1-9;1-9", "min_tokens": 50, "frequency_penalty": 1.0},
}


def check_kinds(h, prompts: dict[str, list[int]], max_tokens: int) -> None:
    for name, kind in KINDS.items():
        params = SamplingParams(**({"max_tokens": max_tokens} | kind))
        expected = plain(prompts[name], params)
        assert h.outputs[name] == expected, name
        if params.num_logprobs is not None:
            told = h.logprobs[name][-len(expected) :]
            assert [one.logprob for one in told] == pytest.approx(own_logprobs(prompts[name], expected), abs=1e-5)
            assert all(len(one.top) == params.num_logprobs for one in told)
        else:
            assert not h.logprobs[name]
    assert not h.failed


@pytest.mark.parametrize("with_prefill", [True, False])
def test_everything_at_once_equals_the_plain_model(house, with_prefill) -> None:
    h = house(token_budget=32)
    d, gate = birth_with_grammars(h)
    p = h.birth(PREFILL) if with_prefill else None
    gate.set()
    prompts = {name: [i, *PROMPT] for i, name in enumerate(KINDS)}
    for name, kind in KINDS.items():
        h.generate(name, prompts[name], 12, d, p, **kind)
    h.settle()
    check_kinds(h, prompts, 12)
    assert h.finished["grammar"] == h.finished["grammar 2"] == FinishReason.STOP
    assert h.outputs["grammar"][-1] == EOS
    assert len(h.outputs["grammar"]) == 10
    assert h.outputs["plain"] != plain(prompts["plain"], SamplingParams(temperature=0.0, frequency_penalty=2.0))
    h.assert_idle()


def test_alone_it_is_the_same(house) -> None:
    h = house()
    d, gate = birth_with_grammars(h)
    gate.set()
    prompts = {name: [i, *PROMPT] for i, name in enumerate(KINDS)}
    for name, kind in KINDS.items():
        h.generate(name, prompts[name], 12, d, None, **kind)
        h.settle()
    check_kinds(h, prompts, 12)
    h.assert_idle()


@pytest.mark.parametrize("num_output", [1, 4, 6])
def test_preempted_and_moved_to_another_worker_they_go_on_exactly(house, num_output) -> None:
    h = house(token_budget=32)
    (d, gate), (other, other_gate) = birth_with_grammars(h), birth_with_grammars(h, number=1)
    gate.set()
    other_gate.set()
    prompts = {name: [i, *PROMPT] for i, name in enumerate(KINDS)}
    for name, kind in KINDS.items():
        h.generate(name, prompts[name], 12, d, None, **kind)
    going = [name for name in KINDS if name != "grammar 2"]
    while min(len(h.outputs[name]) for name in going) < num_output:
        h.random_step()
    role = h.workers[d]._roles[DECODE]
    role._collect_all()
    h.read()
    for name in going[::2]:
        if name in role._entries:
            role._scheduler._preempt(role._entries[name].sequence, role._preempt)
    for _ in range(20):
        h.random_step()
    h.kill(d)
    h.read()
    for name, kind in KINDS.items():
        if name not in h.finished:
            h.generate(name, prompts[name], 12, other, None, **kind)
    h.settle()
    check_kinds(h, prompts, 12)
    h.assert_idle()


def test_choices_have_penalties_and_grammars_of_their_own(house) -> None:
    h = house()
    d, gate = birth_with_grammars(h)
    kind = {"temperature": 1.0, "seed": 8, "frequency_penalty": 1.0, "grammar": GRAMMAR}
    h.generate("a", PROMPT, 12, d, None, choices=(0, 1, 2), **kind)
    for _ in range(5):
        h.random_step()
    gate.set()
    h.settle()
    for choice in range(3):
        expected = plain(PROMPT, SamplingParams(max_tokens=12, **kind), choice)
        assert h.outputs[f"a#{choice}" if choice else "a"] == expected
    assert h.workers[d]._roles[DECODE]._grammars._compiler.num_compiled == 1
    h.assert_idle()


# ---- ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_prefill", [True, False])
def test_pd12_an_end_as_the_first_token(house, with_prefill) -> None:
    """sgl-project/sglang #12151: decode went on behind it. One token, and no decode step but one launched before."""
    h = house()
    p, d = h.birth(PREFILL), h.birth(DECODE)
    kind = {"logit_bias": ((EOS, 100.0),), "stop_token_ids": (EOS,)}
    h.generate("a", PROMPT, 12, d, p if with_prefill else None, **kind)
    h.settle()
    assert h.outputs["a"] == [EOS]
    assert h.finished["a"] == FinishReason.STOP
    num_decoded = h.benches[d].engine.runner.num_tokens_computed - (0 if with_prefill else len(PROMPT))
    assert num_decoded in ((0, 1) if h.overlaps else (0,))
    h.assert_idle()


def test_ap02_bias_outside_of_the_vocabulary_hurts_nobody(house) -> None:
    h = house()
    d = h.birth(DECODE)
    h.generate("bad", PROMPT, 4, d, None, logit_bias=((999999, 5.0), (-1, 5.0)), stop_token_ids=(10**9,), min_tokens=2)
    h.generate("good", [1, *PROMPT], 4, d, None)
    h.settle()
    assert h.outputs["bad"] == plain(PROMPT, SamplingParams(temperature=0.0, max_tokens=4))
    assert h.outputs["good"] == plain([1, *PROMPT], SamplingParams(temperature=0.0, max_tokens=4))
    h.assert_idle()


def test_ignore_eos_does_not_outlive_the_grammar(house) -> None:
    h = house()
    d, gate = birth_with_grammars(h)
    gate.set()
    h.generate("a", PROMPT, 12, d, None, grammar="1-9;1-9", ignore_eos=True)
    h.settle()
    assert (len(h.outputs["a"]), h.outputs["a"][-1], h.finished["a"]) == (3, EOS, FinishReason.STOP)


# ---- grammars that do not go well ------------------------------------------------------------------------------------


def test_sc09_a_grammar_that_cannot_be_compiled_fails_its_request_alone(house) -> None:
    h = house()
    d, gate = birth_with_grammars(h)
    gate.set()
    h.generate("bad", PROMPT, 4, d, None, grammar="! no")
    h.generate("good", PROMPT, 4, d, None)
    h.settle()
    assert h.failed == {"bad": "the grammar is not one"}
    assert h.outputs["good"] == plain(PROMPT, SamplingParams(temperature=0.0, max_tokens=4))
    h.assert_idle()


def test_sc09_a_dead_end_fails_its_request_alone(house) -> None:
    h = house()
    d, gate = birth_with_grammars(h)
    gate.set()
    h.generate("bad", PROMPT, 9, d, None, grammar="1-9;1-9;;1-9")
    h.generate("good", PROMPT, 9, d, None)
    h.settle()
    assert h.failed == {"bad": "the grammar allows no token here"}
    assert len(h.outputs["bad"]) == 2
    assert h.outputs["good"] == plain(PROMPT, SamplingParams(temperature=0.0, max_tokens=9))
    h.assert_idle()


@pytest.mark.parametrize("choices", [(0,), (0, 1, 2)])
def test_sc09_an_abort_while_the_grammar_compiles(house, choices) -> None:
    """And others run meanwhile, to their end."""
    h = house()
    d, gate = birth_with_grammars(h)
    h.generate("slow", PROMPT, 4, d, None, choices=choices, grammar="?1-9")
    h.generate("good", PROMPT, 9, d, None)
    while "good" not in h.finished:
        h.random_step()
    assert h.workers[d]._roles[DECODE].num_waiting == len(choices)
    h.abort("slow")
    while h.workers[d].num_requests:
        h.random_step()
    gate.set()
    h.settle()
    assert not h.outputs["slow"]
    assert not h.failed
    h.generate("slow", PROMPT, 4, d, None, grammar="1-9")  # the id may come again
    h.settle()
    assert h.finished["slow"] == FinishReason.STOP
    h.assert_idle()


def test_a_row_that_needs_known_tokens_sits_out_and_the_others_do_not(house) -> None:
    h = house()
    d = h.birth(DECODE)
    device = h.benches[d].engine.runner.device
    device.holds = h.overlaps  # works only when it is waited for
    h.generate("known", PROMPT, 9, d, None, frequency_penalty=1.0)
    h.generate("free", [1, *PROMPT], 9, d, None)
    role, most = h.workers[d]._roles[DECODE], 0
    for _ in range(400):
        h.random_step()
        for entry in role._entries.values():
            pending = entry.sequence.num_pending_tokens
            most = max(most, pending if entry.request.request_id == "free" else 0)
            assert pending <= 1 or entry.request.request_id == "free"
        if len(role._in_flight) > 1:
            device.wait_for(device.num_done + 1)
            role._collect_done()
    device.holds = False
    h.settle()
    assert most == (2 if h.overlaps else 0)
    assert h.outputs["known"] == plain(PROMPT, SamplingParams(temperature=0.0, max_tokens=9, frequency_penalty=1.0))
    h.assert_idle()


# ---- log-probabilities of the prompt ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_prompt", [1, 2, 8, 23])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_prompt_logprobs_are_those_of_every_token(house, num_prompt, max_tokens) -> None:
    """Also where the prompt is cached: it is computed again, and counted so."""
    h = house()
    d = h.birth(DECODE)
    prompt = PROMPT[:num_prompt]
    for turn in ("first", "again"):
        before = h.benches[d].engine.runner.num_tokens_computed
        h.generate(turn, prompt, max_tokens, d, None, num_prompt_logprobs=2)
        h.settle()
        told = h.prompt_logprobs[turn]
        assert [one.logprob for one in told] == pytest.approx(own_logprobs(prompt[:1], prompt[1:]), abs=1e-5)
        for i, one in enumerate(told, 1):
            logits = own_logits(prompt[:i])
            best = int(logits.argmax())
            assert [token for token, _ in one.top] == [best, 1 if best == 0 else 0]
        assert h.outputs[turn] == plain(prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens))
        assert h.finished[turn] == FinishReason.LENGTH
        assert h.cached[turn] == 0
        computed = h.benches[d].engine.runner.num_tokens_computed - before
        assert computed == num_prompt + max(0, max_tokens - 1)
    h.assert_idle()


def test_prompt_logprobs_survive_preemption_and_come_once(house) -> None:
    h = house(token_budget=4)
    d = h.birth(DECODE)
    h.generate("a", PROMPT, 3, d, None, num_prompt_logprobs=0, choices=(0, 1))
    role = h.workers[d]._roles[DECODE]
    preempted = 0
    for _ in range(2000):
        h.random_step()
        entry = role._entries.get("a")
        if entry is not None and preempted < 3 and entry.sequence.num_computed_tokens >= 8 * (preempted + 1):
            role._collect_all()
            if "a" in role._entries:
                role._scheduler._preempt(entry.sequence, role._preempt)
                preempted += 1
    h.settle()
    assert preempted >= 2
    told = h.prompt_logprobs.pop("a")
    assert [one.logprob for one in told] == pytest.approx(own_logprobs(PROMPT[:1], PROMPT[1:]), abs=1e-5)
    assert not h.prompt_logprobs, "with the first choice alone"
    assert h.outputs["a"] == h.outputs["a#1"] == plain(PROMPT, SamplingParams(temperature=0.0, max_tokens=3))
    h.assert_idle()


def test_a_request_for_nothing_is_refused(house) -> None:
    h = house()
    d = h.birth(DECODE)
    h.generate("a", PROMPT, 0, d, None)
    h.settle()
    assert h.failed == {"a": "neither tokens nor log-probabilities of the prompt are asked for"}
    h.assert_idle()
