"""Simulation: a fleet under a workload, in virtual time."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from ..core.config import SchedulerConfig
from ..core.messages import NodeRef, Role, WorkerInfo
from ..core.queueing import FCFS, QueuePolicy
from ..core.tuner_event import TunerEvent
from .answers import Answers
from .clock import VirtualClock
from .device import Device, Overheads
from .gateway import SimGateway, SimGatewayConfig
from .handover import LinkSpeed
from .network import SimNetwork
from .record import SimRecord
from .workbench import WorkerParts
from .worker import SimWorker
from .workload import SimRequest


@dataclass(frozen=True)
class FleetConfig:
    """Workers of one kind are alike. Without prefill workers the decode workers compute the prompts (colocated).

    `policy` holds in the gateway and in all workers. The targets here are the gateway's, which refuses who cannot be in
    time any more; those of the tuners are in `prefill` and `decode`.

    `is_calibrated`: workers know what their steps cost when they join, as in production; else they learn it from
    requests, and until then the router counts tokens, which can be done by hand.
    """

    num_prefill: int
    num_decode: int
    device: Device
    overheads: Overheads
    prefill: SchedulerConfig
    decode: SchedulerConfig
    num_blocks: int  # of each worker
    block_size: int
    link: LinkSpeed
    message_s: float = 0.0
    overlaps: bool = True
    max_queue: int = 256
    max_queue_delay_s: float = 60.0
    policy: QueuePolicy = FCFS
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    is_elastic: bool = False
    is_calibrated: bool = False


@dataclass(frozen=True)
class SimResult:
    """`virtual_s`: when the last event happened; `real_s`: how long it took to get there."""

    records: list[SimRecord]
    gaps: list[tuple[float, int]]  # inter-token latencies: (seconds, how many times)
    num_tokens_generated: int
    num_prompt_tokens_computed: int
    num_preemptions: int
    num_kv_bytes: int
    busy_s: dict[str, float]  # worker |-> seconds in which its device computed
    num_steps: dict[str, int]
    tuned: list[tuple[str, TunerEvent]]  # worker, what its tuner changed
    virtual_s: float
    real_s: float


class Simulation:
    def __init__(self, config: FleetConfig, requests: Sequence[SimRequest]):
        self.clock = VirtualClock()
        self.network = SimNetwork(self.clock, config.link, config.message_s)
        self.gateway = SimGateway(self.clock, self.network, _gateway_config(config))
        self._config = config
        self._requests = requests
        answers = Answers([request.output_tokens for request in requests])
        names = [(Role.PREFILL, i) for i in range(config.num_prefill)]
        names += [(Role.DECODE, i) for i in range(config.num_decode)]
        self.workers = [SimWorker(self._parts(role, index), answers) for role, index in names]
        for worker in self.workers:
            self.network.join(worker.ref, worker.handle)
            self.gateway.worker_joined(worker.bench.info)
            if config.is_calibrated:
                worker.calibrate()

    def run(self, is_enough: Callable[[Sequence[SimRecord], float], bool] | None = None) -> SimResult:
        """Every request from its arrival to its end.

        `is_enough` is asked every virtual second, with the records so far and the time: true ends the run there.
        """
        began = time.perf_counter()
        self._arrive(0)
        if is_enough is None:
            self.clock.run()
        else:
            self._run_until(is_enough)
        return self._result(time.perf_counter() - began)

    def idle_faults(self) -> list[str]:
        """What is left over although nothing happens any more: empty when every block and request is accounted for."""
        faults = []
        for worker in self.workers:
            worker.bench.blocks.cache.check_integrity()
            ledger = worker.bench.blocks.cache.ledger()
            if ledger.free + ledger.cached != ledger.total:
                faults.append(f"{worker.ref.node_id} holds blocks: {ledger}")
            if worker.num_requests:
                faults.append(f"{worker.ref.node_id} has {worker.num_requests} requests")
        if self.network.num_handovers:
            faults.append(f"{self.network.num_handovers} hand-overs are open")
        in_flight, queued = self.gateway.dispatcher.num_in_flight, self.gateway.dispatcher.num_queued
        if in_flight or queued or self.gateway.admission.credits.num_in_flight:
            faults.append(f"the gateway has {in_flight} requests in flight, {queued} queued")
        return faults

    def _run_until(self, is_enough: Callable[[Sequence[SimRecord], float], bool]) -> None:
        second = 1.0
        while self.clock.has_events and not is_enough(self.gateway.records, self.clock.now):
            self.clock.run(until=second)
            second += 1.0

    def _arrive(self, index: int) -> None:
        """One arrival at a time: the next one is put into the queue by the one before."""
        self.gateway.expects_more = index < len(self._requests)
        if not self.gateway.expects_more:
            return
        request = self._requests[index]

        def arrive() -> None:
            self.gateway.submit(request)
            self._arrive(index + 1)

        self.clock.at(request.arrival_s, arrive)

    def _parts(self, role: Role, index: int) -> WorkerParts:
        config = self._config
        info = WorkerInfo(
            ref=NodeRef(f"{role}-{index}", index + 1),
            roles=(role,),
            pid=0,
            device="simulated",
            model="simulated",
            model_digest="",
            wire_digest="",
            host_digest="",
            endpoints=(),
            block_size=config.block_size,
            num_blocks=config.num_blocks,
            context_length=config.num_blocks * config.block_size,
            max_running=config.decode.max_running,
            threads=1,
            device_kind="cuda" if config.overlaps else "cpu",
        )
        return WorkerParts(
            self.clock,
            self.network,
            self.gateway.ref,
            info,
            msgspec.structs.replace(config.prefill, policy=config.policy),
            msgspec.structs.replace(config.decode, policy=config.policy),
            config.device,
            config.overheads,
            config.overlaps,
        )

    def _result(self, real_s: float) -> SimResult:
        benches = [worker.bench for worker in self.workers]
        return SimResult(
            records=self.gateway.records,
            gaps=[gap for worker in self.workers for gap in worker.decode.gaps.counted],
            num_tokens_generated=sum(bench.num_tokens_generated for bench in benches),
            num_prompt_tokens_computed=sum(bench.num_prompt_tokens for bench in benches),
            num_preemptions=sum(worker.decode.scheduler.num_preemptions for worker in self.workers),
            num_kv_bytes=self.network.num_kv_bytes,
            busy_s={bench.ref.node_id: bench.busy_s for bench in benches},
            num_steps={bench.ref.node_id: bench.num_steps for bench in benches},
            tuned=[(bench.ref.node_id, event) for bench in benches for event in bench.tuned],
            virtual_s=self.clock.now,
            real_s=real_s,
        )


def _gateway_config(config: FleetConfig) -> SimGatewayConfig:
    return SimGatewayConfig(
        config.max_queue,
        config.max_queue_delay_s,
        config.policy,
        config.ttft_target_s,
        config.tpot_target_s,
        config.is_elastic,
    )
