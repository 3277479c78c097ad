"""SimWorkbench: what the roles of one simulated worker share: blocks, a device busy until some time, messages."""

from collections.abc import Callable
from dataclasses import dataclass

from ..core.config import SchedulerConfig
from ..core.messages import CacheUpdate, Message, NodeRef, WorkerInfo
from ..core.step_cost import StepShape
from ..core.tuner_event import TunerEvent
from ..radix_cache.cache import RadixCache
from ..worker.role_share import PATIENCE_S, Patience, RoleShare
from ..worker.sequence_blocks import SequenceBlocks
from ..worker.step_watch import StepWatch
from ..worker.trials import TrialLimits, is_over, is_worth_its_time, trials
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
    prefill: SchedulerConfig
    decode: SchedulerConfig
    device: Device
    overheads: Overheads
    overlaps: bool


@dataclass(frozen=True)
class LaunchedWork:
    """What the device was given: `number` is for `SimWorkbench.collected`."""

    number: int
    began: float
    ends: float


class SimWorkbench:
    """`put`: for the loop to do when it next reads its messages. `wake`: it should go round once more.

    `observers` see each forward pass that is launched: its shape, its duration, and when it ends.
    """

    def __init__(self, parts: WorkerParts, put: Callable[[Callable[[], None]], None], wake: Callable[[], None]):
        self.clock, self.network = parts.clock, parts.network
        self.info, self.ref = parts.info, parts.info.ref
        self.blocks = SequenceBlocks(RadixCache(parts.info.num_blocks, parts.info.block_size), parts.info.block_size)
        self.steps = StepWatch(parts.clock.read)
        self.share = RoleShare(parts.info.num_blocks, has_target=parts.decode.tpot_target_s is not None)
        self.overlaps = parts.overlaps
        self.put = put
        self.host_free_at = 0.0  # when the launch that the host is busy with is done
        self.observers: list[Callable[[StepShape, float, float], None]] = []
        self.tuned: list[TunerEvent] = []
        self.num_steps = 0
        self.num_prompt_tokens = 0  # computed here
        self.num_tokens_generated = 0
        self.busy_s = 0.0
        self._parts = parts
        self.wake = wake
        self._device_free_at = 0.0
        self._num_updates = 0

    def calibrate(self) -> None:
        """As worker/calibration.py: learn from trials what steps cost, before there are requests."""
        prefill, decode = self._parts.prefill, self._parts.decode
        token_budget, elapsed_s = max(prefill.token_budget, decode.token_budget), 0.0
        limits = TrialLimits(
            token_budget, decode.max_running, self.info.context_length, self.info.num_blocks, self.info.block_size
        )
        for trial in trials(limits):
            cost = self.steps.cost
            if is_over(elapsed_s, cost, limits):
                break
            if is_worth_its_time(trial, cost):
                seconds = self._parts.device.step_s(trial.shape, len(trial.prompts))
                self.steps.tried(trial.shape, seconds)
                elapsed_s += seconds

    def wait_for_blocks(self, patience: Patience, *, others_end: bool) -> None:
        """See Patience. Where no other event may come that ends the wait, the loop goes round when it is over."""
        patience.waits(self.clock.now, others_end=others_end)
        if not others_end:
            self.clock.after(PATIENCE_S, self.wake)

    # ---- the device ----------------------------------------------------------------------------------------------

    def launch(self, shape: StepShape, num_chunks: int) -> LaunchedWork:
        """A forward pass, behind what the device has to do already."""
        seconds = self._parts.device.step_s(shape, num_chunks)
        launched = self._occupy(shape, seconds, shape.num_decodes + num_chunks)
        self.num_steps += 1
        self.busy_s += seconds
        self.num_prompt_tokens += shape.num_prompt_tokens
        for observer in self.observers:
            observer(shape, seconds, launched.ends)
        return launched

    def launch_sampling(self, num_sequences: int) -> LaunchedWork:
        """The first tokens after hand-overs: lm_head and sampling only."""
        return self._occupy(StepShape(), self._parts.overheads.sampling_s, num_sequences)

    def _occupy(self, shape: StepShape, seconds: float, num_sequences: int) -> LaunchedWork:
        number = self.blocks.step_launched()
        self.steps.launched(number, shape)
        self.host_free_at = max(self.host_free_at, self.clock.now) + self._parts.overheads.host_s(num_sequences)
        began = max(self._device_free_at, self.host_free_at)
        self._device_free_at = ends = began + seconds
        if self.overlaps:
            self.clock.at(ends, self.wake)
        return LaunchedWork(number, began, ends)

    def collected(self, number: int) -> None:
        self.steps.collected(number)
        self.blocks.step_collected(number)

    # ---- messages ------------------------------------------------------------------------------------------------

    def tell(self, node: NodeRef, message: Message) -> None:
        self.network.send(self.ref, node, message)

    def tell_gateway(self, message: Message) -> None:
        self.network.send(self.ref, self._parts.gateway, message)

    def report(self) -> None:
        """Tell the gateway what the radix tree has gained and lost."""
        if events := self.blocks.cache.drain_events():
            self._num_updates += 1
            self.tell_gateway(CacheUpdate(self._num_updates, events))
