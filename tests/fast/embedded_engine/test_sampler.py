"""What is drawn, and that the reported log-prob is that of the distribution it was drawn from."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from miles.backends.embedded_engine.sampler import SamplingBatch, invert_cdf, sample, uniform
from miles.backends.embedded_engine.sampling_params import RequestError, parse_sampling_params
from tests.fast.embedded_engine.conftest import make_request

VOCAB = 50


def draw(logits: torch.Tensor, *requests, positions=None):
    batch = SamplingBatch.of(requests, torch.device("cpu"), logits.shape[-1])
    positions = np.arange(len(requests)) if positions is None else positions
    return sample(logits.clone(), batch, positions)


def request(**params):
    return make_request([1, 2, 3], vocab=VOCAB, **params)


@pytest.fixture
def logits():
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 3


def test_frequencies_follow_the_reported_log_probs(logits):
    params = {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01}
    requests = [request(sampling_seed=i, **params) for i in range(20000)]
    tokens, _, logp = draw(logits.expand(20000, -1), *requests)
    counts = torch.bincount(tokens, minlength=VOCAB) / 20000
    assert (counts - logp[0].exp()).abs().max() < 0.012
    assert counts[logp[0] == -math.inf].sum() == 0, "a token outside the kept set was drawn"


@pytest.mark.parametrize(
    "params, kept",
    [
        ({"top_k": 3}, lambda p: p >= p.sort(descending=True).values[2]),
        ({"top_p": 0.5}, lambda p: p.sort(descending=True).values.cumsum(0)[(p[:, None] < p).sum(1)] - p <= 0.5),
        ({"min_p": 0.2}, lambda p: p >= 0.2 * p.max()),
    ],
    ids=["top_k", "top_p", "min_p"],
)
def test_filters_keep_these_tokens_and_renormalise(logits, params, kept):
    p = torch.softmax(logits / 0.7, -1)
    expected = torch.where(kept(p), p, 0.0)
    expected /= expected.sum()
    _, value, logp = draw(logits[None], request(temperature=0.7, **params))
    assert torch.allclose(logp[0].exp(), expected, atol=1e-6)
    assert 1 <= (expected > 0).sum() < VOCAB
    assert value[0] <= 0


def test_temperature_scales_the_reported_log_probs(logits):
    token, value, _ = draw(logits[None], request(temperature=0.6))
    assert value[0] == pytest.approx(torch.log_softmax(logits / 0.6, -1)[token[0]].item(), abs=1e-6)


def test_greedy_takes_the_first_maximum_and_reports_the_models_own_log_prob(logits):
    logits[[7, 11]] = 30.0
    token, value, _ = draw(logits[None], request(temperature=0.0))
    assert token[0] == 7
    assert value[0] == pytest.approx(torch.log_softmax(logits, -1)[7].item(), abs=1e-6)


def test_greedy_and_sampled_rows_share_a_batch(logits):
    tokens, _, _ = draw(logits.expand(2, -1), request(temperature=0.0), request(temperature=5.0, sampling_seed=1))
    assert tokens[0] == logits.argmax()


def test_a_draw_depends_on_seed_and_position_alone(logits):
    one, _, _ = draw(logits[None], request(temperature=2.0, sampling_seed=5), positions=np.array([9]))
    many, _, _ = draw(
        logits.expand(3, -1),
        *[request(temperature=2.0, sampling_seed=s) for s in (1, 5, 5)],
        positions=np.array([9, 9, 10]),
    )
    assert many[1] == one[0]
    draws = {draw(logits[None] * 0, request(sampling_seed=5), positions=np.array([i]))[0].item() for i in range(40)}
    assert len(draws) > 20


def test_a_large_vocabulary_is_drawn_from_in_blocks():
    vocab = 20_001
    probs = torch.zeros(4000, vocab)
    tokens = torch.tensor([0, 255, 256, 9000, 20_000])
    weights = torch.tensor([0.1, 0.2, 0.3, 0.25, 0.15])
    probs[:, tokens] = weights
    u = torch.linspace(0, 1, 4001, dtype=torch.float64)[:-1] + 1.0 / 8000
    drawn = invert_cdf(probs, u)
    expected = tokens[torch.searchsorted(weights.double().cumsum(0), u)]
    assert torch.equal(drawn, expected)
    edges = torch.tensor([0.0, 1.0], dtype=torch.float64)
    assert invert_cdf(probs[:2], edges).tolist() == [0, 20_000]


def test_random_numbers_are_uniform_and_differ_between_neighbours():
    seeds, positions = np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(200, dtype=np.uint64))
    u = uniform(seeds.ravel(), positions.ravel())
    assert u.min() >= 0 and u.max() < 1
    assert np.histogram(u, 20, (0, 1))[0].std() < 3 * math.sqrt(2000)
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.02 and len(set(u)) == len(u)


def test_penalties_and_bias_change_logits_as_documented(logits):
    asked = request(
        frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=1.5, logit_bias={"4": -3.0}, temperature=1.0
    )
    asked.output_ids = [9, 9, 10]
    expected = logits.clone()
    for token in (1, 2, 3, 9, 10):
        expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
    expected[9] -= 0.5 * 2 + 0.25
    expected[10] -= 0.5 + 0.25
    expected[4] -= 3.0
    _, _, logp = draw(logits[None], asked)
    assert torch.allclose(logp[0], torch.log_softmax(expected, -1), atol=1e-5)


def test_min_new_tokens_bans_stopping(logits):
    asked = request(min_new_tokens=2, stop_token_ids=[5, 6])
    _, _, logp = draw(logits[None], asked)
    assert logp[0, [5, 6]].tolist() == [-math.inf, -math.inf]
    asked.output_ids = [1, 1]
    assert torch.isfinite(draw(logits[None], asked)[2]).all()


def test_every_bad_parameter_is_named_at_once():
    with pytest.raises(RequestError) as error:
        parse_sampling_params({"temperatur": 1, "top_p": "high", "json_schema": "{}", "stop_token_ids": [1.5]}, VOCAB)
    for word in (
        "'temperatur'",
        "top_p has type str",
        "json_schema is not supported",
        "stop_token_ids must be a list of int",
    ):
        assert word in str(error.value)
    with pytest.raises(RequestError) as error:
        parse_sampling_params({"temperature": -1, "top_p": 0, "top_k": 0, "n": 0, "logit_bias": {"99": 1}}, VOCAB)
    for word in ("temperature -1", "top_p 0", "top_k 0", "n 0", "logit_bias names a token outside"):
        assert word in str(error.value)
