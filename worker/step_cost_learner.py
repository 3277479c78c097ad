"""StepCostLearner: the coefficients of StepCost from the steps a worker runs. Pure; durations come in.

Least squares of the *relative* error, so that a step of 5 ms counts as much as one of 500 ms:

    minimise  sum_k f^(age of k) * h_k * ((y_k - x_k w) / p_k)^2  +  sum_i RIDGE * (w_i - r_i)^2    with w >= 0

x are the shape's numbers times the prior's coefficients, so that every w_i is near 1 and the five are comparable; p_k
is what was predicted when step k came. Each part has its reason:

    f   old steps are forgotten over minutes of *computing*: machines slow down and speed up, idle time teaches nothing;
        faster while the residuals are all on one side
    h   Huber's weight: one step that took 20 times as long moves the sum by no more than one at the clipping point
    r   where the estimate was, followed as slowly as steps are forgotten. A coefficient that the steps of late say
        nothing about (a decode worker without prompts) stays where it was last known, at first at the prior
    w>=0  coordinate descent that stops at zero, started where the last one ended

The prior knows no device: it has the proportions that the terms have on GPUs and CPUs alike within a factor of ten or
so; the first steps give its scale.
"""

import math
from statistics import median

from ..core.step_cost import StepCost, StepShape

_PRIOR = (128.0, 1.0, 1 / 16384, 1.0, 1 / 512)  # each term of one step, in units of one prompt token
_RIDGE = 2e-3  # information of the reference, in steps whose time is all in one term
_NUM_SCALING = 5  # steps that give the prior its scale
_MEMORY_S = 120.0  # of computing, after which a step counts 1/e
_LEAST_MEMORY = 64  # steps, however long they take
_HASTE = 40.0  # times as much is forgotten while residuals are one-sided: the machine's speed has changed
_SHORTEST_MEMORY = 10  # steps, in all haste
_HUBER = 2.5  # clip residuals beyond so many times their running mean
_LEAST_CLIP = 0.05  # relative; noise below it is never clipped
_MEAN_RATE = 0.02  # of the running mean of residuals
_SWEEPS = 1  # of coordinate descent per step; they add up over steps
_MAX_SWEEPS = 200  # when the coefficients are asked for
_TRIAL_WORTH = 6  # samples: steps as they come are much alike, trials are not

_Vector = list[float]


class StepCostLearner:
    """`num_warmup` steps after a start are left out: allocators, caches and autotuning distort them."""

    def __init__(self, num_warmup: int = 10):
        self._num_to_skip = num_warmup
        self._first: list[tuple[StepShape, float, int]] = []
        self._unit = 0.0  # seconds per unit of the prior; 0: no step yet
        self._reference: _Vector = [1.0] * 5
        self._weights: _Vector = [1.0] * 5
        self._information: list[_Vector] = [[0.0] * 5 for _ in range(5)]
        self._moment: _Vector = [0.0] * 5
        self._num_samples = self._num_prompt_samples = self._num_decode_samples = 0
        self._mean_residual = 0.5  # of the sizes of clipped relative residuals: their scale, for Huber
        self._mean_sign = 0.0  # of residuals; 1 or -1: all are on one side
        self._relative_error = 1.0

    def observe(self, shape: StepShape, seconds: float, *, is_usual: bool = True) -> None:
        """A step of that shape took so long. `is_usual` false: something else made it long (a graph was captured)."""
        if not is_usual or shape.is_empty or not 0.0 < seconds < math.inf:
            return
        if self._num_to_skip:
            self._num_to_skip -= 1
        else:
            self._take(shape, seconds, 1)

    def tried(self, shape: StepShape, seconds: float) -> None:
        """As `observe`, but of a step whose size was chosen to tell much, after a warm-up that nobody told of.

        It counts for the trust in the cost as several do. In what it says about the cost it is one among the others, so
        it is outweighed as soon as there are more of them, and forgotten like them.
        """
        self._num_to_skip = 0
        self._take(shape, seconds, _TRIAL_WORTH)

    @property
    def cost(self) -> StepCost:
        """The coefficients now. Before the first steps: of no use, and `num_samples` says so."""
        self._descend(_MAX_SWEEPS)
        unit = self._unit or 1e-6
        base, token, product, decode, context = (w * p * unit for w, p in zip(self._weights, _PRIOR, strict=True))
        counts = self._num_prompt_samples, self._num_decode_samples
        return StepCost(base, token, product, decode, context, self._num_samples, self._relative_error, *counts)

    # ---- learning ------------------------------------------------------------------------------------------------

    def _take(self, shape: StepShape, seconds: float, worth: int) -> None:
        """The first ones give the prior its unit, such that it is right about their median; then learn from them."""
        if self._unit:
            self._learn(shape, seconds, worth)
            return
        self._first.append((shape, seconds, worth))
        if len(self._first) == _NUM_SCALING:
            self._unit = median(seconds / sum(_terms(shape, 1.0)) for shape, seconds, _ in self._first)
            for first in self._first:
                self._learn(*first)
            self._first.clear()

    def _learn(self, shape: StepShape, seconds: float, worth: int) -> None:
        terms = _terms(shape, self._unit)
        predicted = max(_dot(terms, self._weights), 1e-3 * sum(terms))
        residual = seconds / predicted - 1.0
        haste = 1.0 + (_HASTE - 1.0) * self._mean_sign**4
        clip = max(_HUBER * self._mean_residual, _LEAST_CLIP)
        clipped = min(max(residual, -clip), clip)
        self._num_samples += worth
        self._num_prompt_samples += worth * (shape.num_prompt_tokens > 0)
        self._num_decode_samples += worth * (shape.num_decodes > 0)
        self._mean_residual += _MEAN_RATE * (abs(clipped) - self._mean_residual)
        self._mean_sign += _MEAN_RATE * (math.copysign(1.0, residual) - self._mean_sign)
        self._relative_error += max(_MEAN_RATE, worth / self._num_samples) * (abs(clipped) - self._relative_error)
        keep = math.exp(
            -min(haste * predicted * (1.0 + clipped) / _MEMORY_S, haste / _LEAST_MEMORY, 1 / _SHORTEST_MEMORY)
        )
        huber = clipped / residual if residual else 1.0
        self._add([term / predicted for term in terms], seconds / predicted, huber, keep)
        self._descend(_SWEEPS)
        self._reference = [r + (1.0 - keep) * (w - r) for r, w in zip(self._reference, self._weights, strict=True)]

    def _add(self, row: _Vector, value: float, weight: float, keep: float) -> None:
        """Add an equation row * w = value, after all earlier ones have lost (1 - keep) of their weight."""
        a, b, c, d, e = row
        for i, x in enumerate(row):
            t, u, v, w, z = self._information[i]
            x *= weight
            self._information[i] = [
                keep * t + x * a,
                keep * u + x * b,
                keep * v + x * c,
                keep * w + x * d,
                keep * z + x * e,
            ]
            self._moment[i] = keep * self._moment[i] + x * value

    def _descend(self, max_sweeps: int) -> None:
        """Coordinate descent towards the least non-negative sum of squares."""
        weights, information = self._weights, self._information
        for _ in range(max_sweeps):
            change = 0.0
            for i, row in enumerate(information):
                old = weights[i]
                gradient = self._moment[i] - _dot(row, weights) + _RIDGE * (self._reference[i] - old)
                new = old + gradient / (row[i] + _RIDGE)
                weights[i] = new = new if new > 0.0 else 0.0
                change += abs(new - old)
            if change < 1e-6:
                return


def _terms(shape: StepShape, unit: float) -> _Vector:
    """What the prior says each term of the step takes."""
    base, token, product, decode, context = _PRIOR
    return [
        unit * base,
        unit * token * shape.num_prompt_tokens,
        unit * product * shape.prompt_products,
        unit * decode * shape.num_decodes,
        unit * context * shape.decode_context,
    ]


def _dot(a: _Vector, b: _Vector) -> float:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2] + a[3] * b[3] + a[4] * b[4]
