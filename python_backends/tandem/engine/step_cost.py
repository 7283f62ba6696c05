"""What a step of this engine takes, learnt from every step. Torch-free and pure."""

from __future__ import annotations

# Optimistic, so that what was never tried is tried: 5 ms a step, 0.1 ms a sequence and a token.
_PRIOR = (5e-3, 1e-4, 1e-4)
_SCALES = (1.0, 8.0, 64.0)  # usual sizes of the three parts, so that each learns at its own rate
_GAIN = 0.15  # how much of an error a step corrects, once a few were seen
_MAX_SURPRISE = 3.0  # more than so many times the expected time counts as that: an outlier


class StepCost:
    """``seconds ≈ fixed + per_decode · decoding sequences + per_token · prefill tokens``.

    Normalized least mean squares: each step moves the estimate towards the plane of all costs that
    would have explained it, so kinds of steps that do not occur keep their estimate.
    """

    def __init__(self) -> None:
        self._costs = [cost * scale for cost, scale in zip(_PRIOR, _SCALES, strict=True)]
        self._num_observed = 0

    def observe(self, num_decoding: int, num_prefill_tokens: int, seconds: float) -> None:
        """One step of this size took ``seconds``."""
        expected = self.seconds(num_decoding, num_prefill_tokens)
        parts = _parts(num_decoding, num_prefill_tokens)
        self._num_observed += 1
        gain = max(_GAIN, 1 / self._num_observed)
        if gain == _GAIN:
            seconds = min(seconds, _MAX_SURPRISE * expected)
        correction = gain * (seconds - expected) / sum(part * part for part in parts)
        self._costs = [
            max(cost + correction * part, 1e-6)
            for cost, part in zip(self._costs, parts, strict=True)
        ]

    def seconds(self, num_decoding: int, num_prefill_tokens: int) -> float:
        """What a step of this size is expected to take."""
        parts = _parts(num_decoding, num_prefill_tokens)
        return sum(cost * part for cost, part in zip(self._costs, parts, strict=True))

    def prefill_tokens_within(self, num_decoding: int, seconds: float) -> int:
        """How many prefill tokens fit beside the decoding sequences; negative if these alone
        take longer."""
        per_token = self._costs[2] / _SCALES[2]
        return int((seconds - self.seconds(num_decoding, 0)) / per_token)


def _parts(num_decoding: int, num_prefill_tokens: int) -> tuple[float, float, float]:
    return 1.0, num_decoding / _SCALES[1], num_prefill_tokens / _SCALES[2]
