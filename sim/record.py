"""What became of one request, as its client saw it. Seconds of virtual time."""

from dataclasses import dataclass

from ..core.latency import time_per_output_token


@dataclass(slots=True)
class SimRecord:
    """`status` is that of HTTP: 200 when the answer is complete, 0 while it is on its way."""

    index: int
    arrived_s: float
    prompt_tokens: int
    status: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    ended_s: float = 0.0
    retry_after_s: int | None = None

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrived_s

    @property
    def e2el_s(self) -> float:
        return self.last_token_s - self.arrived_s

    @property
    def tpot_s(self) -> float | None:
        return time_per_output_token(self.ttft_s, self.e2el_s, self.output_tokens)
