"""A vocabulary that two ranks share gives the log-probs, entropies and gradients of the whole one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from miles.backends.training_utils.logprobs import log_probs_from_logits
from miles.backends.training_utils.vocab_parallel import VocabShard, vocab_parallel_log_probs
from tests.helpers.gloo_world import World

ROWS, VOCAB, SIZE = 11, 13, 8  # two shards of 8 columns, of which the last 3 are padding


@pytest.fixture(scope="module")
def ranks():
    with World(2) as world:
        yield world


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(ROWS, 2 * SIZE, generator=generator) * 4
    logits[0, 3] = float("-inf")  # a token that cannot be
    logits[1, 2] = float("inf")  # a broken row, which the loss below ignores
    return logits, torch.randint(0, VOCAB, (ROWS,), generator=generator), torch.randn(2, ROWS, generator=generator)


def differences(chunk: int, with_entropy: bool) -> list[float]:
    logits, targets, weights = inputs()
    targets[0] = 5
    weights[:, 1] = 0
    rank = dist.get_rank()
    whole = logits[:, :VOCAB].clone().requires_grad_()
    expected = log_probs_from_logits(whole, targets, temperature=0.7, with_entropy=with_entropy)
    own = logits[:, rank * SIZE : (rank + 1) * SIZE].clone().requires_grad_()
    shard = VocabShard(rank * SIZE, SIZE, VOCAB, dist.group.WORLD)
    found = vocab_parallel_log_probs(own, targets, shard, temperature=0.7, chunk=chunk, with_entropy=with_entropy)
    kept = [i for i in range(ROWS) if i != 1]
    worst = []
    for values, w in ((expected, weights), (found, weights)):
        sum((v[kept] * x[kept]).sum() for v, x in zip(values, w, strict=True) if v is not None).backward()
    worst = [float((a - b)[kept].abs().max()) for a, b in zip(found, expected, strict=True) if a is not None]
    grad = torch.nn.functional.pad(whole.grad, (0, 2 * SIZE - VOCAB))[:, rank * SIZE : (rank + 1) * SIZE]
    return [*worst, float((own.grad - grad)[kept].abs().max()), float(own.grad[1].abs().max())]


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_two_shards_are_the_whole(ranks: World, chunk: int, with_entropy: bool):
    for found in ranks.run(differences, chunk, with_entropy):
        assert max(found) < 1e-5, found


def test_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"logits of shape \(2, 5\)"):
        vocab_parallel_log_probs(torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64), VocabShard(0, 4, 4), chunk=8)
