"""What a worker says when its tuners change something: a line in its log, and a message to each gateway."""

import logging

from ..core.messages import Tuned
from ..core.tuner_event import TunerEvent
from ..transfer.channels import WorkerChannels

logger = logging.getLogger(__name__)


def report_tuning(events: list[TunerEvent], channels: WorkerChannels) -> None:
    """Nothing is said when nothing changed."""
    for event in events:
        logger.debug("tuned: %s", event)
    if events:
        channels.broadcast_gateways(Tuned(events))
