"""Gateway: all parts of one gateway put together; what the HTTP handlers work with."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from ..core.config import GatewayConfig
from ..core.messages import NodeRef, Role
from ..core.request import SamplingParams, Urgency
from ..core.timeline import Station, Timeline
from ..radix_cache.index import PrefixIndexes
from ..transfer.gateway_channel import GatewayChannel
from ..transfer.keys import ClusterKeys
from ..vocab.chat_template import ChatTemplate
from ..vocab.model_config import load_model_config
from ..vocab.tokenizer import Tokenizer
from ..vocab.tool_format import HERMES
from .admission import Admission
from .batches.service import Batches
from .cache_feed import CacheFeed
from .cluster import Channel, Cluster
from .deltas import PieceParser
from .dispatcher import Dispatcher
from .generation import Unavailable
from .grammars import Grammars
from .membership import Membership
from .metrics import Metrics
from .openai.formats import AnswerFormat
from .openai.parser import RequestParser
from .openai.request import ParsedRequest
from .placement import Placement
from .probe import Probe
from .prompts import Limits, Prompt, PromptBuilder
from .role_rules import role_rule
from .role_table import RoleTable
from .settings_check import Settings, SettingsCheck
from .stream import Response
from .tenants import Tenants
from .tools.answer_parsers import answer_parser

DRAIN_POLL_S = 0.05
_PROBE_TOKENS = 4
_PROMPT_END = 8  # tokens that are looked at for what the prompt has begun

logger = logging.getLogger(__name__)


class Gateway:
    """One model, one channel, one table of requests. `run` serves the channel until it is cancelled.

    Raises ConfigurationError for a model folder that cannot be used.
    """

    def __init__(self, config: GatewayConfig, ref: NodeRef, channel: Channel):
        folder = Path(config.model_folder)
        model = load_model_config(folder)
        self.config = config
        self.started_at = int(time.time())
        self.vocab_size = model.vocab_size
        self.tenants = Tenants(config.model_digest, config.key_file)
        self.tokenizer = Tokenizer.from_folder(folder)
        template = ChatTemplate.from_folder(folder, self.tokenizer)
        self._tool_format = HERMES if template is None else template.tool_format
        self._thinks = template is not None and template.thinks
        self.parser = RequestParser(config.served_model, model.vocab_size, self._tool_format)
        self.prompts = PromptBuilder(self.tokenizer, template, model)
        self.grammars = Grammars(config.model_folder, model.vocab_size, self.prompts.eos_token_ids)
        self.membership = Membership(ref, config.model_digest, config.worker_timeout_s)
        self.metrics = Metrics(lambda: list(self.membership.workers.values()))
        self.cluster = Cluster(channel, self.membership)
        index = PrefixIndexes()
        admission = Admission(config.max_queue, config.max_queue_delay_s, config.policy, config.ttft_target_s)
        self._placement = Placement(
            self.membership,
            index,
            admission,
            self.metrics,
            config.expected_prefill,
            config.tpot_target_s,
            may_be_local=config.may_prefill_locally,
        )
        self.dispatcher = Dispatcher(self.membership, self._placement, admission, self.metrics, self.cluster.send)
        self.probe = Probe(
            self.dispatcher,
            self.membership,
            _probe_prompt(model.vocab_size),
            expected_prefill=config.expected_prefill,
            expected_decode=config.expected_decode,
        )
        rule = role_rule(self._placement, config.ttft_target_s, config.tpot_target_s) if config.is_elastic else None
        self.roles = RoleTable(self.membership, self.cluster.send, self.metrics, rule)
        settings = Settings(config.policy, config.ttft_target_s, config.tpot_target_s)
        check = SettingsCheck(self.membership, settings, self._placement.prompt_tokens)
        feed = CacheFeed(index, self.cluster.send)
        self.cluster.listeners += [feed, self.dispatcher, self.probe, self.roles, check]
        self.batches = Batches(self, Path(config.batch_dir) if config.batch_dir else None)
        self._model_context = model.max_position_embeddings

    @property
    def limits(self) -> Limits:
        return self._placement.limits(self._model_context)

    @property
    def backlogs(self) -> dict[NodeRef, dict[Role, float]]:
        """Seconds until a prompt sent there now would be begun, by role; of workers whose speed is known."""
        return self._placement.backlogs(time.monotonic())

    @asynccontextmanager
    async def generating(
        self, request: ParsedRequest, answer: AnswerFormat, timeline: Timeline, urgency: Urgency, namespace: str
    ) -> AsyncIterator[Response]:
        """Has the request generated, to be spelled by `answer`; leaving the block ends what still runs.

        Raises RequestError for what is wrong with it, and Unavailable when workers cannot serve it now.
        """
        response = Response(self.dispatcher, self.metrics, self.tokenizer, answer, request, self.config.keep_alive_s)
        if request.sampling.grammar:
            await self.grammars.check(request.sampling.grammar, request.grammar_param)
        prompts = await self.prompts.build(request, self.limits)
        timeline = timeline.stamped(Station.TOKENISED)
        try:
            response.start(prompts, namespace, timeline, urgency, partial(self._answer_parser, request))
            yield response
        except Unavailable as error:
            error.headers = response.queue_headers
            raise
        finally:
            response.close()

    def _answer_parser(self, request: ParsedRequest, prompt: Prompt) -> PieceParser:
        """What reads one answer to `request`."""
        end = self.tokenizer.decode(prompt.token_ids[-_PROMPT_END:], skip_special_tokens=False)
        return answer_parser(request, self._tool_format, thinks=self._thinks, prompt_end=end)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.cluster.run())
            tasks.create_task(self.probe.run())

    async def drain(self, timeout_s: float) -> None:
        """Take nothing new and let what runs finish; what has not by then gets an error. Lines of batches can wait for
        the next start.
        """
        self.dispatcher.is_draining = True
        await self.batches.stop()
        deadline = time.monotonic() + timeout_s
        while self.dispatcher.num_in_flight + self.dispatcher.num_queued and time.monotonic() < deadline:
            await asyncio.sleep(DRAIN_POLL_S)
        self.dispatcher.stop("this server has been shut down")


def open_gateway(config: GatewayConfig) -> tuple[Gateway, GatewayChannel]:
    """A gateway with its sockets bound. Must run in the event loop that will serve it; the caller closes the channel.

    Raises ConfigurationError when an address, the key file or the model cannot be used.
    """
    ref = NodeRef(config.gateway_id, secrets.randbits(63))
    channel = GatewayChannel(config.bind, ref, ClusterKeys.load(config.key_file))
    try:
        return Gateway(config, ref, channel), channel
    except BaseException:
        channel.close()
        raise


def _probe_prompt(vocab_size: int) -> Prompt:
    """Any tokens do: the answer is not looked at."""
    token_ids = [min(token_id, vocab_size - 1) for token_id in range(1, _PROBE_TOKENS + 1)]
    return Prompt(token_ids, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
