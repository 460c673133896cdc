"""From logits to tokens and the log-probs of exactly the distribution that they were drawn from.

Every row is handled by itself: the random number of a token is a hash of its request's seed and its position in the
sequence, so neither the batch nor a retraction changes what is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from miles.backends.embedded_engine.request import Request

_MIX1, _MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_BLOCK, _BLOCKED_ABOVE = 256, 2048  # tokens of a large vocabulary that are summed together; what is large
_BELOW_ONE = 1 - 2.0**-50  # keeps a rounded quantile below the total
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Counter-based random numbers in [0, 1), fp64: two rounds of splitmix64 over seed and position, both uint64."""

    def mix(z: np.ndarray) -> np.ndarray:
        z = (z ^ (z >> np.uint64(30))) * _MIX1
        z = (z ^ (z >> np.uint64(27))) * _MIX2
        return z ^ (z >> np.uint64(31))

    with np.errstate(over="ignore"):
        z = mix(mix(seeds + _GOLDEN) + (positions + np.uint64(1)) * _GOLDEN)
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass
class SamplingBatch:
    """The sampling settings of a fixed list of requests, one row each; built once while the list does not change."""

    requests: Sequence[Request]
    seeds: np.ndarray  # [rows] uint64
    temperature: torch.Tensor | None  # [rows, 1]; None when all are 1
    greedy: torch.Tensor | None  # [rows] bool; None when none is
    all_greedy: bool
    filtered: torch.Tensor | None  # indices of rows with top-p, top-k or min-p
    top_p: torch.Tensor
    top_k: torch.Tensor
    min_p: torch.Tensor
    edited: list[int]  # rows whose logits change with what was generated

    @classmethod
    def of(cls, requests: Sequence[Request], device: torch.device, vocab_size: int) -> SamplingBatch:
        params = [r.params for r in requests]
        greedy = [p.greedy for p in params]
        temperature = [1.0 if p.greedy else p.temperature for p in params]
        filtered = [i for i, p in enumerate(params) if p.filtered]

        def column(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)[:, None]

        return cls(
            requests=requests,
            seeds=np.array([r.seed for r in requests], dtype=np.uint64),
            temperature=None if all(t == 1.0 for t in temperature) else column(temperature),
            greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
            all_greedy=all(greedy),
            filtered=torch.tensor(filtered, device=device) if filtered else None,
            top_p=column([params[i].top_p for i in filtered]),
            top_k=column([params[i].top_k if params[i].top_k > 0 else vocab_size for i in filtered]),
            min_p=column([params[i].min_p for i in filtered]),
            edited=[i for i, p in enumerate(params) if p.edits_logits or p.min_new_tokens > 0],
        )


def sample(
    logits: torch.Tensor, batch: SamplingBatch, positions: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw one token a row.

    Args: logits [rows, vocab] fp32 (may be overwritten), positions [rows]: index of the new token in its sequence.
    Returns: tokens [rows], their log-probs [rows], and the log-probs of the whole sampling distribution [rows, vocab]:
        after penalties, temperature and filters, renormalised. Greedy rows report the model's own distribution.
    """
    if batch.edited:
        logits = logits.clone()
        for row in batch.edited:
            edit_logits(logits[row], batch.requests[row])
    if batch.temperature is not None:
        logits = logits / batch.temperature
    logp = torch.log_softmax(logits, dim=-1)
    if batch.filtered is not None:
        logp[batch.filtered] = _filter(logp[batch.filtered], batch)
    if batch.all_greedy:
        tokens = logits.argmax(dim=-1)
    else:
        u = torch.from_numpy(uniform(batch.seeds, positions.astype(np.uint64))).to(logits.device)
        tokens = invert_cdf(logp.exp(), u)
        if batch.greedy is not None:
            tokens = torch.where(batch.greedy, logits.argmax(dim=-1), tokens)
    return tokens, logp.gather(1, tokens[:, None])[:, 0], logp


def invert_cdf(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The token at quantile u [rows] of each row of probs [rows, vocab] (not necessarily summing to 1): [rows].

    In a large vocabulary first the block, then the token in it: cheaper than a running sum over the whole row.
    """
    rows, vocab = probs.shape
    if vocab <= _BLOCKED_ABOVE:
        return _quantile(probs.cumsum(dim=-1, dtype=torch.float64), u)
    blocks = F.pad(probs, (0, -vocab % _BLOCK)).view(rows, -1, _BLOCK)
    mass = blocks.sum(dim=-1, dtype=torch.float64)
    ends = mass.cumsum(dim=-1)
    block = _quantile(ends, u)
    picked = block[:, None]
    chosen = mass.gather(1, picked)[:, 0]
    into = (u * ends[:, -1] - (ends.gather(1, picked)[:, 0] - chosen)) / chosen
    within = blocks[torch.arange(rows, device=probs.device), block].cumsum(dim=-1, dtype=torch.float64)
    return block * _BLOCK + _quantile(within, into.clamp_(0.0, 1.0))


def _quantile(ends: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """First index of each row whose running sum exceeds the share u of the total; so never one of weight 0."""
    target = u * ends[:, -1] * _BELOW_ONE
    return torch.searchsorted(ends, target[:, None], right=True)[:, 0].clamp_(max=ends.shape[-1] - 1)


def _filter(logp: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Keep each row's top-k, top-p and min-p tokens (each measured on the unfiltered distribution), renormalised."""
    ordered, index = logp.sort(dim=-1, descending=True, stable=True)
    probs = ordered.exp()
    before = probs.cumsum(dim=-1, dtype=torch.float64) - probs
    rank = torch.arange(logp.shape[-1], device=logp.device)
    drop = (rank >= batch.top_k) | (before > batch.top_p) | (probs < batch.min_p * probs[:, :1])
    drop[:, 0] = False
    ordered = ordered.masked_fill(drop, float("-inf"))
    ordered = ordered - torch.logsumexp(ordered, dim=-1, keepdim=True)
    return torch.empty_like(logp).scatter_(1, index, ordered)


def edit_logits(row: torch.Tensor, request: Request) -> None:
    """Apply logit bias, repetition, frequency and presence penalties, and the ban on stopping early, in place."""
    p = request.params
    if p.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(request.input_ids) | set(request.output_ids)), device=row.device)
        values = row[seen]
        row[seen] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
    if request.output_ids and (p.frequency_penalty or p.presence_penalty):
        ids, counts = torch.tensor(request.output_ids, device=row.device).unique(return_counts=True)
        row[ids] -= p.frequency_penalty * counts + p.presence_penalty
    if p.logit_bias:
        ids = torch.tensor(list(p.logit_bias), device=row.device)
        row[ids] += torch.tensor(list(p.logit_bias.values()), device=row.device)
    if len(request.output_ids) < p.min_new_tokens and request.stop_ids:
        row[torch.tensor(sorted(request.stop_ids), device=row.device)] = float("-inf")


def top_logprobs(logp: torch.Tensor, k: int) -> list[tuple[float, int]]:
    """The k most likely tokens of one row, ties by token id."""
    k = min(k, logp.shape[-1])
    values, ids = logp.sort(descending=True, stable=True)
    return list(zip(values[:k].tolist(), ids[:k].tolist(), strict=True))
