"""Workloads have the asked shape, are a function of the seed alone, and stay out of the special tokens."""

import pytest

from baton.bench.options import WorkloadOptions
from baton.bench.workloads import Alphabet, synthetic_workload, warmup_workload
from baton.core.errors import ConfigurationError

IDS = Alphabet.of_token_ids(49152)
WORDS = Alphabet.of_words()


def options(**fields: object) -> WorkloadOptions:
    return WorkloadOptions(**{"num_requests": 6, "input_len": 10, "output_len": 3, **fields})


def prompts(workload: object) -> list[object]:
    return [turn.content for session in workload.sessions for turn in session.turns]


def test_random_prompts_have_the_length_and_differ() -> None:
    workload = synthetic_workload(options(), IDS, None)
    contents = prompts(workload)
    assert [len(content) for content in contents] == [10] * 6
    assert len({tuple(content) for content in contents}) == 6
    assert all(turn.num_output_tokens == 3 for session in workload.sessions for turn in session.turns)
    assert workload.num_requests == 6
    assert workload.arrivals_s is None


@pytest.mark.parametrize("kind", ["random", "shared-prefix", "multi-turn"])
def test_the_seed_decides_everything(kind: str) -> None:
    first = synthetic_workload(options(workload=kind, seed=7), WORDS, 2.0)
    assert first == synthetic_workload(options(workload=kind, seed=7), WORDS, 2.0)
    other = synthetic_workload(options(workload=kind, seed=8), WORDS, 2.0)
    assert prompts(first) != prompts(other)
    assert first.arrivals_s != other.arrivals_s


def test_ids_stay_out_of_the_ends_of_the_vocabulary() -> None:
    contents = prompts(synthetic_workload(options(num_requests=50, input_len=500), IDS, None))
    ids = [token for content in contents for token in content]
    assert min(ids) >= 1536
    assert max(ids) < 49152 - 1536


def test_a_tiny_vocabulary_still_works_and_none_does_not() -> None:
    assert set(prompts(synthetic_workload(options(), Alphabet.of_token_ids(2), None))[0]) <= {0, 1}
    with pytest.raises(ConfigurationError, match="--vocab-size 1"):
        Alphabet.of_token_ids(1)


def test_words_render_as_text_that_can_be_joined() -> None:
    (content, *_) = prompts(synthetic_workload(options(), WORDS, None))
    assert isinstance(content, str)
    assert content.startswith(" ")
    assert len(content.split()) == 10


def test_shared_prefixes() -> None:
    asked = options(workload="shared-prefix", num_requests=40, prefix_len=20, num_prefixes=3)
    contents = prompts(synthetic_workload(asked, IDS, None))
    assert {len(content) for content in contents} == {30}
    assert len({tuple(content[:20]) for content in contents}) == 3
    assert len({tuple(content[20:]) for content in contents}) == 40


def test_conversations() -> None:
    workload = synthetic_workload(options(workload="multi-turn", num_requests=7, turns=3), WORDS, 2.0)
    assert [len(session.turns) for session in workload.sessions] == [3, 3, 1]
    assert workload.num_requests == 7
    assert len(set(prompts(workload))) == 7
    assert workload.arrivals_s is not None
    assert len(workload.arrivals_s) == 3
    assert workload.arrivals_s[-1] == 3.5  # 7 requests at 2 a second, though only 3 sessions arrive


def test_rate_sets_the_duration() -> None:
    workload = synthetic_workload(options(), IDS, 2.0)
    assert workload.arrivals_s is not None
    assert workload.arrivals_s[-1] == 3.0


def test_warm_up_does_not_warm_the_measured_prompts() -> None:
    warm = prompts(warmup_workload(options(), IDS, 3))
    assert len(warm) == 3
    measured = prompts(synthetic_workload(options(), IDS, None))
    assert not {tuple(content) for content in warm} & {tuple(content) for content in measured}
