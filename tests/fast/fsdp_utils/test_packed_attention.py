"""Packed rows: no sequence sees another, and each gets what it would get alone."""

import pytest
import torch

from miles.backends.fsdp_utils.packed_attention import packed_attention, why_not_packed

LENGTHS = [5, 1, 9, 3]


def random_qkv(heads=4, kv_heads=2, dim=8, seed=0):
    g = torch.Generator().manual_seed(seed)
    total = sum(LENGTHS)
    return [torch.randn(1, h, total, dim, generator=g, requires_grad=True) for h in (heads, kv_heads, kv_heads)]


def written_out(query, key, value, window=None, scaling=None):
    """Softmax attention of one sequence with an explicit mask: `[1, tokens, heads, dim]`."""
    n, repeat = query.shape[2], query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = query @ key.transpose(-1, -2) * (scaling or query.shape[-1] ** -0.5)
    back = torch.arange(n)[:, None] - torch.arange(n)[None]
    seen = (back >= 0) if window is None else (back >= 0) & (back < window)
    return (scores.masked_fill(~seen, float("-inf")).softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_equals_attention_written_out_for_each_sequence_with_gradients(kv_heads, window):
    qkv = random_qkv(kv_heads=kv_heads)
    out, _ = packed_attention(torch.nn.Module(), *qkv, None, packed_lengths=LENGTHS, sliding_window=window, scaling=0.3)
    parts = zip(*(x.split(LENGTHS, 2) for x in qkv), strict=True)
    expected = torch.cat([written_out(*part, window=window, scaling=0.3) for part in parts], dim=1)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    weight = torch.linspace(-1, 1, out.numel()).view_as(out)
    ours = torch.autograd.grad((out * weight).sum(), qkv)
    theirs = torch.autograd.grad((expected * weight).sum(), qkv)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_neighbour_changes_nothing_not_even_the_last_bit():
    qkv = [x.detach() for x in random_qkv()]
    before, _ = packed_attention(torch.nn.Module(), *qkv, None, packed_lengths=LENGTHS)
    changed = [torch.cat([x[:, :, :5], torch.full_like(x[:, :, 5:], 1e4)], dim=2) for x in qkv]
    after, _ = packed_attention(torch.nn.Module(), *changed, None, packed_lengths=LENGTHS)
    assert torch.equal(before[:, :5], after[:, :5])
    alone, _ = packed_attention(torch.nn.Module(), *(x[:, :, 6:15] for x in qkv), None, packed_lengths=[9])
    assert torch.equal(before[:, 6:15], alone)


def test_refuses_to_attend_without_borders_or_with_sinks():
    qkv = random_qkv()
    with pytest.raises(ValueError, match="without packed_lengths"):
        packed_attention(torch.nn.Module(), *qkv, None)
    with pytest.raises(ValueError, match="sinks"):
        packed_attention(torch.nn.Module(), *qkv, None, packed_lengths=LENGTHS, s_aux=torch.ones(4))


def test_architectures_whose_mask_it_cannot_rebuild_are_not_packed():
    import transformers

    qwen = transformers.Qwen3Config()
    assert why_not_packed(transformers.Qwen3ForCausalLM, qwen) is None
    chunked = transformers.Qwen3Config(layer_types=["chunked_attention"] * qwen.num_hidden_layers)
    assert "chunked_attention" in why_not_packed(transformers.Qwen3ForCausalLM, chunked)
    gemma = transformers.Gemma2Config()
    assert "softcapping" in why_not_packed(transformers.Gemma2ForCausalLM, gemma)
    assert "does not call" in why_not_packed(torch.nn.Module, qwen)
