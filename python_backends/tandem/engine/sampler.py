"""Chooses the next token: a pure function of logits, parameters, history, seed and position.

::

    logits ── repetition, presence, frequency penalties, min_tokens ── temperature 0: argmax
                                                                    └─ else: temperature, top_k,
                                                     top_p, min_p, inverse CDF at a uniform number

The uniform number comes from a counter (seed, position), so neither the batch, nor the pool, nor a
restart changes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tandem.engine.step_inputs import device_tensor, to_device
from tandem.errors import EngineFault
from tandem.types import SamplingParams

_UINT64 = (1 << 64) - 1
_LEAST = 1e-6  # temperature and repetition penalty: smaller ones overflow
_NUM_LIKELY = 256  # tokens that nearly always hold the mass of top_p


@dataclass(frozen=True)
class SampleRequest:
    params: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]

    @property
    def position(self) -> int:
        """Of the token to choose, counted from the start of the prompt."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def must_not_stop(self) -> bool:
        return len(self.output_ids) < self.params.min_tokens and bool(self.params.stop_token_ids)

    @property
    def is_plain_greedy(self) -> bool:
        """The token is the argmax of the logits as they are."""
        p = self.params
        has_penalty = p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty
        return p.temperature == 0 and not has_penalty and not self.must_not_stop


@dataclass(frozen=True)
class Sampled:
    token_id: int
    logprob: float | None = None  # under the logits before penalties and temperature


@torch.inference_mode()
def sample(logits: torch.Tensor, requests: list[SampleRequest]) -> list[Sampled]:
    """One token for each row of ``logits`` [num_requests, vocab_size] (float32).

    Raises EngineFault if a row holds NaN or infinity where a maximum should be.
    """
    assert logits.shape[0] == len(requests)
    if not requests:
        return []
    maxima, token_ids = logits.max(dim=-1)
    edited = [row for row, request in enumerate(requests) if not request.is_plain_greedy]
    if edited:
        rows = device_tensor(edited, logits.device)
        token_ids[rows] = _choose(logits[rows], [requests[row] for row in edited])
    wanted = [row for row, request in enumerate(requests) if request.params.logprobs]
    parts = [token_ids, maxima, _logprobs(logits, token_ids, wanted)]
    # One copy to the host. On a GPU it is what a step waits for; float64 holds all three exactly.
    values = torch.cat([part.double() for part in parts]).tolist()
    chosen, best, logprobs = (
        values[: len(requests)],
        values[len(requests) : 2 * len(requests)],
        dict(zip(wanted, values[2 * len(requests) :], strict=True)),
    )
    if not all(map(math.isfinite, best)):
        raise EngineFault("the model returned logits that are not finite")
    return [Sampled(int(token_id), logprobs.get(row)) for row, token_id in enumerate(chosen)]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) for the token at ``position`` (Philox, Salmon et al. 2011)."""
    generator = np.random.Philox(key=seed & _UINT64, counter=[position, 0, 0, 0])
    return float(np.random.Generator(generator).random())


def _logprobs(logits: torch.Tensor, token_ids: torch.Tensor, wanted: list[int]) -> torch.Tensor:
    """[len(wanted)] log-softmax of the logits as they came, at the chosen tokens of these rows."""
    if not wanted:
        return logits.new_empty(0)
    rows = device_tensor(wanted, logits.device)
    logprobs = torch.log_softmax(logits[rows], dim=-1)
    return logprobs.gather(-1, token_ids[rows].unsqueeze(-1)).squeeze(-1)


def _choose(scores: torch.Tensor, requests: list[SampleRequest]) -> torch.Tensor:
    """Token ids [num_requests]; ``scores`` is a copy that may be written to."""
    _apply_repetition_penalty(scores, requests)
    _apply_count_penalties(scores, requests)
    _suppress_stops(scores, requests)
    token_ids = scores.argmax(dim=-1)
    drawn = [row for row, request in enumerate(requests) if request.params.temperature > 0]
    if drawn:
        rows = device_tensor(drawn, scores.device)
        token_ids[rows] = _draw(scores[rows], [requests[row] for row in drawn])
    return token_ids


def _draw(scores: torch.Tensor, requests: list[SampleRequest]) -> torch.Tensor:
    """Token ids [num_requests], all of temperature above 0.

    Each filter is a threshold, and the draw goes in the order of the vocabulary: nothing depends
    on how a sort orders equal scores, which differs with the shape of the batch. Tokens as likely
    as the last one kept are kept too.
    """
    params = [request.params for request in requests]
    device = scores.device
    # The best score becomes 0: however small the temperature, no quotient is infinite.
    scores.sub_(scores.amax(dim=-1, keepdim=True))
    temperatures = [max(p.temperature, _LEAST) for p in params]
    scores.div_(_column(temperatures, torch.float32, device))
    if any(p.top_k > 0 for p in params):
        scores.masked_fill_(scores < _kth_score(scores, [p.top_k for p in params]), -torch.inf)
    probs = torch.softmax(scores, dim=-1)
    floor = torch.zeros(len(params), 1, device=device)
    if any(p.top_p < 1 for p in params):
        floor = _top_p_floor(probs, [p.top_p for p in params])
    if any(p.min_p > 0 for p in params):
        min_p = _column([p.min_p for p in params], torch.float32, device)
        floor = torch.maximum(floor, probs.amax(dim=-1, keepdim=True) * min_p)
    probs.masked_fill_(probs < floor, 0.0)
    cdf = probs.cumsum(dim=-1, dtype=torch.float64)
    total = cdf[:, -1:].contiguous()
    points = _column([uniform(r.params.seed, r.position) for r in requests], torch.float64, device)
    token_ids = torch.searchsorted(cdf, points * total, right=True)
    # Rounding may put a point on the very end: the last token with any weight.
    return torch.minimum(token_ids, torch.searchsorted(cdf, total)).squeeze(-1)


def _kth_score(scores: torch.Tensor, top_ks: list[int]) -> torch.Tensor:
    """[rows, 1] the smallest of the ``top_k`` best scores; -inf where top_k is off."""
    vocab_size = scores.shape[-1]
    width = min(max(top_ks), vocab_size)
    best = scores.topk(width, dim=-1).values
    ks = _column([min(k, width) if k > 0 else 1 for k in top_ks], torch.int64, scores.device)
    is_off = _column([k <= 0 for k in top_ks], torch.bool, scores.device)
    return best.gather(-1, ks - 1).masked_fill(is_off, -torch.inf)


def _top_p_floor(probs: torch.Tensor, top_ps: list[float]) -> torch.Tensor:
    """[rows, 1] the least likely token of the smallest set that holds ``top_p``; 0 where off."""
    vocab_size = probs.shape[-1]
    # A row without top_p needs no mass, so it does not widen the search.
    mass = _column([p if p < 1 else 0.0 for p in top_ps], torch.float64, probs.device)
    width = min(_NUM_LIKELY, vocab_size)
    while True:  # the host waits for each turn of it
        best = probs.topk(width, dim=-1).values  # sorted
        mass_before = best.cumsum(dim=-1, dtype=torch.float64) - best
        num_kept = (mass_before < mass).sum(dim=-1, keepdim=True)
        if width == vocab_size or bool((num_kept < width).all()):
            break
        width = min(16 * width, vocab_size)
    is_off = _column([p >= 1 for p in top_ps], torch.bool, probs.device)
    return best.gather(-1, (num_kept - 1).clamp(min=0)).masked_fill(is_off, 0.0)


def _column(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return device_tensor(values, device, dtype).unsqueeze(-1)


def _apply_repetition_penalty(scores: torch.Tensor, requests: list[SampleRequest]) -> None:
    """Positive scores of seen tokens are divided, negative multiplied (arXiv 1909.05858)."""
    ids = [
        np.unique(np.asarray([*r.prompt_ids, *r.output_ids], dtype=np.int64))
        if r.params.repetition_penalty != 1
        else np.empty(0, np.int64)
        for r in requests
    ]
    rows, columns = _index(ids, scores.device)
    if len(columns):
        factors = [max(r.params.repetition_penalty, _LEAST) for r in requests]
        penalties = device_tensor(factors, scores.device, torch.float32)[rows]
        seen = scores[rows, columns]
        scores[rows, columns] = torch.where(seen > 0, seen / penalties, seen * penalties)


def _apply_count_penalties(scores: torch.Tensor, requests: list[SampleRequest]) -> None:
    """``score -= presence_penalty + count * frequency_penalty`` for tokens of the output."""
    ids, amounts = [], []
    for request in requests:
        p = request.params
        used = request.output_ids if p.presence_penalty or p.frequency_penalty else ()
        unique, counts = np.unique(np.asarray(used, dtype=np.int64), return_counts=True)
        ids.append(unique)
        amounts.append(p.presence_penalty + counts * p.frequency_penalty)
    rows, columns = _index(ids, scores.device)
    if len(columns):
        amount = torch.from_numpy(np.concatenate(amounts)).to(scores.dtype)
        amount = to_device(amount, scores.device)
        scores[rows, columns] -= amount


def _suppress_stops(scores: torch.Tensor, requests: list[SampleRequest]) -> None:
    """No stop token before ``min_tokens``."""
    vocab_size = scores.shape[-1]
    ids = [
        np.asarray(
            [i for i in r.params.stop_token_ids if 0 <= i < vocab_size] if r.must_not_stop else [],
            dtype=np.int64,
        )
        for r in requests
    ]
    rows, columns = _index(ids, scores.device)
    # Not infinite: there is a token also where every one is a stop token.
    scores[rows, columns] = torch.finfo(scores.dtype).min


def _index(
    ids: list[npt.NDArray[np.int64]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of every id, for one indexed read or write of a [rows, vocab] tensor."""
    rows = np.repeat(np.arange(len(ids)), [len(row) for row in ids])
    columns = np.concatenate(ids)
    return to_device(torch.from_numpy(rows), device), to_device(torch.from_numpy(columns), device)
