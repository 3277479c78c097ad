"""SimWorker: what both kinds of simulated worker share: blocks, a device that is busy until some time, messages."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from ..core.config import SchedulerConfig
from ..core.messages import CacheUpdate, Message, NodeRef, WorkerInfo
from ..core.step_cost import StepCost, StepShape
from ..core.tuner_event import TunerEvent
from ..radix_cache.cache import RadixCache
from ..worker.sequence_blocks import SequenceBlocks
from ..worker.step_watch import StepWatch
from .clock import VirtualClock
from .device import Device, Overheads
from .network import SimNetwork


@dataclass(frozen=True)
class WorkerParts:
    """What a worker is built from. `overlaps`: a step is launched while the one in front of it runs (GPUs)."""

    clock: VirtualClock
    network: SimNetwork
    gateway: NodeRef
    info: WorkerInfo
    config: SchedulerConfig
    device: Device
    overheads: Overheads
    overlaps: bool


class SimWorker(ABC):
    """`observers` see each step that is launched: its shape, its duration, and when it ends."""

    def __init__(self, parts: WorkerParts):
        self.clock, self.network = parts.clock, parts.network
        self.info, self.ref = parts.info, parts.info.ref
        self.blocks = SequenceBlocks(RadixCache(parts.info.num_blocks, parts.info.block_size), parts.info.block_size)
        self.overheads, self.overlaps = parts.overheads, parts.overlaps
        self.host_free_at = 0.0  # when the launch that the host is busy with is done
        self.observers: list[Callable[[StepShape, float, float], None]] = []
        self.num_steps = 0
        self.num_prompt_tokens = 0  # computed here
        self.busy_s = 0.0
        self._parts = parts
        self._device_free_at = 0.0
        self._turn_is_due = False
        self._num_updates = 0
        self._is_tuned = parts.config.token_budget_range is not None
        self._steps = StepWatch(parts.clock.read)
        self.tuned: list[TunerEvent] = []

    @property
    @abstractmethod
    def num_requests(self) -> int:
        """Requests known in any phase."""

    @abstractmethod
    def turn(self) -> None:
        """Once around the loop, now."""

    @abstractmethod
    def handle(self, sender: NodeRef, message: Message) -> None:
        """Take a message."""

    def wake(self) -> None:
        """Something happened: a turn is due once everything else of this instant has happened too."""
        if not self._turn_is_due:
            self._turn_is_due = True
            self.clock.after(0.0, self._woken)

    def _woken(self) -> None:
        self._turn_is_due = False
        self.turn()

    def occupy_device(self, shape: StepShape, num_chunks: int) -> tuple[float, float]:
        """Launch a step behind what the device has to do already; when it begins and when it ends."""
        seconds = self._parts.device.step_s(shape, num_chunks)
        began, ends = self.occupy_device_for(seconds, shape.num_decodes + num_chunks)
        self.num_steps += 1
        self.busy_s += seconds
        self.num_prompt_tokens += shape.num_prompt_tokens
        for observer in self.observers:
            observer(shape, seconds, ends)
        return began, ends

    def occupy_device_for(self, seconds: float, num_sequences: int) -> tuple[float, float]:
        """As `occupy_device`, for work that is no forward pass."""
        self.host_free_at = max(self.host_free_at, self.clock.now) + self.overheads.host_s(num_sequences)
        began = max(self._device_free_at, self.host_free_at)
        self._device_free_at = began + seconds
        return began, self._device_free_at

    def step_launched(self, shape: StepShape) -> int:
        """Its number, for `step_collected`. What tuners learn from is watched only where there are any."""
        number = self.blocks.step_launched()
        if self._is_tuned:
            self._steps.launched(number, shape)
        return number

    def step_collected(self, number: int) -> None:
        self.blocks.step_collected(number)
        if self._is_tuned:
            self._steps.collected(number)

    def tune(self, update: Callable[[float, StepCost], list[TunerEvent]]) -> None:
        """Before a plan: let the worker's pacing change its scheduler's limits."""
        if self._is_tuned:
            self.tuned += update(self.clock.now, self._steps.cost)

    def tell_gateway(self, message: Message) -> None:
        self.network.send(self.ref, self._parts.gateway, message)

    def report(self) -> None:
        """Tell the gateway what the radix tree has gained and lost."""
        if events := self.blocks.cache.drain_events():
            self._num_updates += 1
            self.tell_gateway(CacheUpdate(self._num_updates, events))
