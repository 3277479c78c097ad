"""Which worker runs on which card, and how much of the card's memory is its own. Pure.

    cards    0    1    2    3          --prefill 1 --decode 2, by default
    workers  P0   D0   D1   -

Prefill and decode share no card where there are two: a prompt beside a decode step is what this system is there to
avoid. With fewer cards than workers, workers of one kind share. Shares are of a card's total memory and are dealt out
here, once, before any worker starts: two that started together and read what is free would both count the same memory.
"""

from collections import Counter
from collections.abc import Sequence

import msgspec

from ..core.errors import ConfigurationError
from .gpus import Gpu, find_gpu
from .sizes import format_size

CARD_SHARE = 0.9  # of a card's memory for its workers; the rest is for the driver, the contexts and fragmentation
_CONTEXT_SHARE = 0.02  # kept from what is free when others use the card already


class DeviceSlot(msgspec.Struct, frozen=True):
    """One worker's place: a card, and its part of that card's memory."""

    gpu: Gpu
    share: float


class Placement(msgspec.Struct, frozen=True):
    """A place for each worker, in their order, and what the user should know about it."""

    prefill: tuple[DeviceSlot, ...]
    decode: tuple[DeviceSlot, ...]
    warnings: tuple[str, ...] = ()

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The cards in use, each once."""
        return tuple({slot.gpu: None for slot in (*self.prefill, *self.decode)})

    @property
    def lines(self) -> tuple[str, ...]:
        """What the user is told: the warnings, then who has what."""
        workers = [
            f"{kind}-{index} has {slot.share:.0%} of {slot.gpu.text}"
            for kind, slots in (("prefill", self.prefill), ("decode", self.decode))
            for index, slot in enumerate(slots)
        ]
        sizes = ", ".join(f"cuda:{gpu.index} {format_size(gpu.total_bytes)}" for gpu in self.gpus if gpu.total_bytes)
        return (*self.warnings, f"cards: {', '.join(workers)}{f'; memory: {sizes}' if sizes else ''}")


def place_workers(
    num_prefill: int, num_decode: int, gpus: Sequence[Gpu], prefill_devices: str = "auto", decode_devices: str = "auto"
) -> Placement:
    """`gpus`: the visible cards, at least one. Raises ConfigurationError for a list that names no card."""
    named_prefill = choose_gpus(f"--prefill-devices {prefill_devices}", prefill_devices, gpus)
    named_decode = choose_gpus(f"--decode-devices {decode_devices}", decode_devices, gpus)
    auto_prefill, auto_decode = _divide(num_prefill, num_decode, gpus, named_prefill, named_decode)
    prefill = _deal(num_prefill, named_prefill or auto_prefill)
    decode = _deal(num_decode, named_decode or auto_decode)
    on_card = Counter(gpu.uuid for gpu in (*prefill, *decode))
    warnings = [
        *_unused("--prefill-devices", named_prefill, num_prefill),
        *_unused("--decode-devices", named_decode, num_decode),
        *_shared(prefill, decode),
        *_taken([gpu for gpu in gpus if on_card[gpu.uuid]]),
    ]
    slots = [
        tuple(DeviceSlot(gpu, free_share(gpu) / on_card[gpu.uuid]) for gpu in workers) for workers in (prefill, decode)
    ]
    return Placement(slots[0], slots[1], tuple(warnings))


def choose_gpus(typed: str, text: str, gpus: Sequence[Gpu]) -> list[Gpu]:
    """The cards that `0,1` or `GPU-1a2b,GPU-3c4d` names; none for auto. Raises ConfigurationError."""
    if text == "auto":
        return []
    chosen = []
    for word in text.split(","):
        gpu = find_gpu(tuple(gpus), word.strip())
        if gpu is None:
            known = ", ".join(f"{gpu.index} ({gpu.name}, {gpu.uuid[:12]})" for gpu in gpus)
            raise ConfigurationError(f"{typed}: there is no card {word.strip()!r}. Visible here: {known}.")
        chosen.append(gpu)
    return chosen


def free_share(gpu: Gpu) -> float:
    """What the workers of one launcher may take of a card: CARD_SHARE, or less where others use the card already."""
    if not gpu.total_bytes or not gpu.free_bytes:
        return CARD_SHARE
    return max(0.0, min(CARD_SHARE, gpu.free_bytes / gpu.total_bytes - _CONTEXT_SHARE))


def _divide(
    num_prefill: int, num_decode: int, gpus: Sequence[Gpu], named_prefill: list[Gpu], named_decode: list[Gpu]
) -> tuple[list[Gpu], list[Gpu]]:
    """The cards of each kind where the user names none: those that the other kind's list leaves, or a cut."""
    if named_prefill or named_decode:
        taken = {gpu.uuid for gpu in (*named_prefill, *named_decode)}
        left = [gpu for gpu in gpus if gpu.uuid not in taken] or list(gpus)
        return left, left
    if len(gpus) == 1 or not num_prefill or not num_decode:
        return list(gpus), list(gpus)
    # Rounded down: a decode worker's card holds the KV of everything that runs, so decode gets the odd one.
    cut = min(num_prefill, max(1, len(gpus) * num_prefill // (num_prefill + num_decode)))
    return list(gpus[:cut]), list(gpus[cut:])


def _deal(num_workers: int, gpus: Sequence[Gpu]) -> list[Gpu]:
    """Round robin."""
    return [gpus[index % len(gpus)] for index in range(num_workers)]


def _unused(option: str, named: list[Gpu], num_workers: int) -> list[str]:
    if len(named) <= num_workers:
        return []
    rest = ", ".join(str(gpu.index) for gpu in named[num_workers:])
    return [f"warning: {option} names {len(named)} cards for {num_workers} worker(s); {rest} stays unused"]


def _shared(prefill: Sequence[Gpu], decode: Sequence[Gpu]) -> list[str]:
    names: dict[Gpu, list[str]] = {}
    for kind, workers in (("prefill", prefill), ("decode", decode)):
        for index, gpu in enumerate(workers):
            names.setdefault(gpu, []).append(f"{kind}-{index}")
    return [
        f"warning: {' and '.join(workers)} share {gpu.text}: they slow each other down, and each gets "
        f"{free_share(gpu) / len(workers):.0%} of its memory"
        for gpu, workers in names.items()
        if len(workers) > 1
    ]


def _taken(gpus: Sequence[Gpu]) -> list[str]:
    return [
        f"warning: only {format_size(gpu.free_bytes)} of {format_size(gpu.total_bytes)} of {gpu.text} are free: "
        f"its workers take {free_share(gpu):.0%} of it instead of {CARD_SHARE:.0%}"
        for gpu in gpus
        if free_share(gpu) < CARD_SHARE
    ]
