"""Which worker gets which card and how much of it, by literals."""

import pytest

from baton.core.errors import ConfigurationError
from baton.launch.placement import free_share, place_workers

GIB = 1024**3


def cards_of(slots) -> list[int]:
    return [slot.gpu.index for slot in slots]


@pytest.mark.parametrize(
    ("num_cards", "num_prefill", "num_decode", "prefill", "decode"),
    [
        (1, 1, 1, [0], [0]),
        (2, 1, 1, [0], [1]),
        (4, 1, 1, [0], [1]),
        (4, 2, 2, [0, 1], [2, 3]),
        (8, 1, 3, [0], [1, 2, 3]),
        (8, 6, 2, [0, 1, 2, 3, 4, 5], [6, 7]),
        (3, 2, 2, [0, 0], [1, 2]),  # too few for one each, enough to keep the kinds apart
        (3, 3, 1, [0, 1, 0], [2]),
        (2, 1, 3, [0], [1, 1, 1]),
        (2, 3, 1, [0, 0, 0], [1]),
        (1, 0, 1, [], [0]),
        (2, 0, 3, [], [0, 1, 0]),
    ],
)
def test_by_default_the_kinds_share_no_card_where_there_are_two(
    num_cards, num_prefill, num_decode, prefill, decode, builders
):
    placement = place_workers(num_prefill, num_decode, builders.cards(num_cards))
    assert (cards_of(placement.prefill), cards_of(placement.decode)) == (prefill, decode)


@pytest.mark.parametrize(
    ("prefill_devices", "decode_devices", "prefill", "decode"),
    [
        ("0,1", "2,3", [0, 1], [2, 3]),
        ("3", "auto", [3, 3], [0, 1]),  # a list shorter than the workers goes round; the others take what it leaves
        ("auto", "0,2", [1, 3], [0, 2]),
        ("1,1", "0", [1, 1], [0, 0]),
        ("0,1,2,3", "auto", [0, 1], [0, 1]),  # nothing is left: all are used
        ("GPU-3333-aaaa,GPU-2", "0", [3, 2], [0, 0]),
        ("MIG-9/1/0", "0", [4, 4], [0, 0]),
    ],
)
def test_cards_by_name(prefill_devices, decode_devices, prefill, decode, builders):
    placement = place_workers(2, 2, builders.cards(4), prefill_devices, decode_devices)
    assert (cards_of(placement.prefill), cards_of(placement.decode)) == (prefill, decode)


def test_a_card_of_its_own_is_not_worth_a_warning(builders):
    placement = place_workers(1, 1, builders.cards(2))
    assert [slot.share for slot in (*placement.prefill, *placement.decode)] == [0.9, 0.9]
    assert placement.lines == (
        "cards: prefill-0 has 90% of cuda:0 (NVIDIA H200), decode-0 has 90% of cuda:1 (NVIDIA H200); "
        "memory: cuda:0 140 GiB, cuda:1 140 GiB",
    )


def test_workers_that_share_a_card_share_its_memory(builders):
    placement = place_workers(1, 2, builders.cards(1))
    assert [slot.share for slot in (*placement.prefill, *placement.decode)] == pytest.approx([0.3] * 3)
    assert placement.warnings == (
        "warning: prefill-0 and decode-0 and decode-1 share cuda:0 (NVIDIA H200): they slow each other down, and each "
        "gets 30% of its memory",
    )


def test_cards_too_many_are_said_to_stay_unused(builders):
    placement = place_workers(1, 1, builders.cards(4), "0,2", "1,3")
    assert (cards_of(placement.prefill), cards_of(placement.decode)) == ([0], [1])
    assert placement.warnings == (
        "warning: --prefill-devices names 2 cards for 1 worker(s); 2 stays unused",
        "warning: --decode-devices names 2 cards for 1 worker(s); 3 stays unused",
    )


def test_a_card_that_others_use_is_shared_from_what_is_free(builders):
    (card,) = builders.cards(1, free_bytes=70 * GIB)
    assert free_share(card) == pytest.approx(0.48)  # 70 / 140 - 2 %
    placement = place_workers(0, 2, [card])
    assert [slot.share for slot in placement.decode] == pytest.approx([0.24, 0.24])
    assert placement.warnings[-1] == (
        "warning: only 70.0 GiB of 140 GiB of cuda:0 (NVIDIA H200) are free: its workers take 48% of it instead of 90%"
    )


def test_what_is_not_known_of_a_card_counts_as_free(builders):
    (card,) = builders.cards(1, total_bytes=0, free_bytes=0)
    assert free_share(card) == 0.9
    assert "memory" not in place_workers(0, 1, [card]).lines[-1]


@pytest.mark.parametrize("devices", ["4", "0,4", "-1", "", "0,", "first", "GPU-9", "GPU-"])
def test_an_unknown_card_is_named_with_those_there_are(devices, builders):
    with pytest.raises(ConfigurationError, match=r"--decode-devices .* there is no card .* 0 \(NVIDIA H200, GPU-0000"):
        place_workers(1, 1, builders.cards(2), "auto", devices)
