from types import SimpleNamespace

import pytest
import torch

from miles.backends.training_utils import logprobs
from miles.backends.training_utils.logprobs import (
    chunk_rows,
    linear_log_probs,
    log_probs_from_logits,
    loss_temperature,
)

ROWS, HIDDEN, VOCAB = 11, 7, 19


def inputs(dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, generator=g).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, generator=g).to(dtype).requires_grad_()
    bias = torch.randn(VOCAB, generator=g).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCAB, (ROWS,), generator=g)
    return hidden, weight, bias, targets


def written_out(hidden, weight, bias, targets, temperature):
    logits = (hidden @ weight.T + (0 if bias is None else bias)) / temperature
    log_p = torch.log_softmax(logits.float(), -1)
    return log_p[torch.arange(len(targets)), targets], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("chunk", [1, 4, 11, 100, None])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("use_bias", [False, True])
def test_chunked_equals_written_out_with_gradients(chunk, temperature, use_bias):
    hidden, weight, bias, targets = inputs(torch.float32)
    bias = bias if use_bias else None
    leaves = [x for x in (hidden, weight, bias) if x is not None]
    coefficients = torch.linspace(-1, 2, ROWS)
    want_lp, want_h = written_out(hidden, weight, bias, targets, temperature)
    want = torch.autograd.grad((coefficients * want_lp).sum() + (coefficients.square() * want_h).sum(), leaves)
    lp, h = linear_log_probs(
        hidden, weight, targets, bias=bias, temperature=temperature, chunk=chunk, with_entropy=True
    )
    got = torch.autograd.grad((coefficients * lp).sum() + (coefficients.square() * h).sum(), leaves)
    torch.testing.assert_close(lp, want_lp)
    torch.testing.assert_close(h, want_h)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk", [3, None])
def test_from_logits_equals_written_out_with_gradients(chunk):
    hidden, weight, _, targets = inputs(torch.float32)
    logits = (hidden @ weight.T).detach().requires_grad_()
    lp, _ = log_probs_from_logits(logits, targets, temperature=0.7, chunk=chunk)
    want = torch.log_softmax(logits / 0.7, -1).gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(lp, want)
    weights = torch.arange(ROWS).float()
    (got,) = torch.autograd.grad((lp * weights).sum(), logits)
    (expected,) = torch.autograd.grad((want * weights).sum(), logits)
    torch.testing.assert_close(got, expected)


def test_a_frozen_head_gets_no_gradient_and_the_hidden_states_do():
    hidden, weight, _, targets = inputs(torch.float32)
    lp, entropy = linear_log_probs(hidden, weight.detach(), targets, chunk=4)
    lp.sum().backward()
    assert hidden.grad is not None and entropy is None


def test_entropy_that_nobody_differentiates_costs_no_gradient():
    hidden, weight, _, targets = inputs(torch.float32)
    lp, entropy = linear_log_probs(hidden, weight, targets, chunk=4, with_entropy=True)
    alone, _ = linear_log_probs(hidden, weight, targets, chunk=4)
    assert entropy is not None
    a = torch.autograd.grad(lp.sum(), hidden)[0]
    b = torch.autograd.grad(alone.sum(), hidden)[0]
    assert torch.equal(a, b)


def test_no_tensor_of_all_rows_times_vocab_is_made(monkeypatch):
    """Logits exist a chunk at a time, in forward and in backward."""
    seen = []
    original = logprobs._chunk_logits

    def spy(hidden, *rest):
        logits = original(hidden, *rest)
        seen.append(logits.shape[0])
        return logits

    monkeypatch.setattr(logprobs, "_chunk_logits", spy)
    hidden, weight, _, targets = inputs(torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        lp, _ = linear_log_probs(hidden, weight, targets, chunk=4)
    lp.sum().backward()
    assert seen == [4, 4, 3, 4, 4, 3]
    assert (ROWS, VOCAB) not in saved


def test_a_row_without_weight_cannot_poison_the_others():
    hidden, weight, _, targets = inputs(torch.float32)
    broken = hidden.detach().clone()
    broken[3] = float("inf")
    broken.requires_grad_()
    for chunk in (2, None):
        lp, _ = linear_log_probs(broken, weight, targets, chunk=chunk)
        keep = torch.arange(ROWS) != 3
        grad_hidden, grad_weight = torch.autograd.grad(torch.where(keep, lp, 0.0).sum(), [broken, weight])
        assert torch.isfinite(grad_hidden[keep]).all() and (grad_hidden[3] == 0).all()
        clean, _ = linear_log_probs(hidden[keep], weight, targets[keep])
        torch.testing.assert_close(grad_weight, torch.autograd.grad(clean.sum(), weight)[0])


def test_bfloat16_inputs_give_float32_log_probs_and_bfloat16_gradients():
    hidden, weight, _, targets = inputs(torch.bfloat16)
    lp, _ = linear_log_probs(hidden, weight, targets, chunk=4)
    assert lp.dtype == torch.float32
    lp.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


def test_no_rows_is_fine():
    hidden, weight, _, targets = inputs(torch.float32)
    lp, _ = linear_log_probs(hidden[:0], weight, targets[:0])
    lp.sum().backward()
    assert lp.shape == (0,) and (weight.grad == 0).all()


def test_rows_and_targets_must_match():
    hidden, weight, _, targets = inputs(torch.float32)
    with pytest.raises(ValueError, match="11 rows of hidden states for 10 targets"):
        linear_log_probs(hidden, weight, targets[:-1])


def test_temperature_is_for_rl_only():
    assert loss_temperature(SimpleNamespace(loss_type="policy_loss", rollout_temperature=0.6)) == 0.6
    assert loss_temperature(SimpleNamespace(loss_type="sft_loss", rollout_temperature=0.6)) == 1.0
    assert loss_temperature(SimpleNamespace(loss_type="policy_loss", rollout_temperature=0.0)) == 1.0


def test_chunk_size_follows_the_flag_or_the_memory():
    assert chunk_rows(SimpleNamespace(log_probs_chunk_size=77), 1000) == 77
    assert chunk_rows(SimpleNamespace(log_probs_chunk_size=-1), 151936) * 151936 * 4 <= 256 * 2**20
