"""Packed rows: no sequence sees another, and each gets what it would get alone."""

import pytest
import torch

from miles.backends.fsdp_utils.layout import PackedLayout
from miles.backends.fsdp_utils.packed_attention import (
    PACKED,
    PACKED_EAGER,
    AttentionChoice,
    choose_attention,
    packed_attention,
)

LENGTHS = [5, 1, 9, 3]


def random_qkv(heads=4, kv_heads=2, dim=8, seed=0):
    g = torch.Generator().manual_seed(seed)
    total = sum(LENGTHS)
    return [torch.randn(1, h, total, dim, generator=g, requires_grad=True) for h in (heads, kv_heads, kv_heads)]


def written_out(query, key, value, window=None, scaling=None, softcap=None, sinks=None):
    """Softmax attention of one sequence, one query position at a time: `[1, tokens, heads, dim]`."""
    n, repeat = query.shape[2], query.shape[1] // key.shape[1]
    rows = []
    for t in range(n):
        first = 0 if window is None else max(0, t - window + 1)
        heads = []
        for h in range(query.shape[1]):
            logits = key[0, h // repeat, first : t + 1] @ query[0, h, t] * (scaling or query.shape[-1] ** -0.5)
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            weights = logits.exp()
            total = weights.sum() + (sinks[h].exp() if sinks is not None else 0.0)
            heads.append((weights / total) @ value[0, h // repeat, first : t + 1])
        rows.append(torch.stack(heads))
    return torch.stack(rows).unsqueeze(0)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("extra", ["nothing", "softcap", "sinks", "eager"])
def test_equals_attention_written_out_for_each_sequence_with_gradients(kv_heads, window, extra):
    qkv = random_qkv(kv_heads=kv_heads)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], requires_grad=True) if extra == "sinks" else None
    softcap = 0.7 if extra == "softcap" else None
    out, _ = packed_attention(
        torch.nn.Module(), *qkv, None, packed_layout=PackedLayout.whole(LENGTHS), sliding_window=window, scaling=0.3, softcap=softcap,
        s_aux=sinks, fused=extra != "eager",
    )  # fmt: skip
    parts = zip(*(x.split(LENGTHS, 2) for x in qkv), strict=True)
    expected = [written_out(*part, window=window, scaling=0.3, softcap=softcap, sinks=sinks) for part in parts]
    expected = torch.cat(expected, dim=1)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    weight = torch.linspace(-1, 1, out.numel()).view_as(out)
    inputs = qkv if sinks is None else [*qkv, sinks]
    ours = torch.autograd.grad((out * weight).sum(), inputs)
    theirs = torch.autograd.grad((expected * weight).sum(), inputs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("extra", ["nothing", "softcap", "sinks", "eager"])
def test_responses_to_a_shared_prompt_see_it_and_not_each_other(window, extra):
    prompt, responses = 5, (1, 9, 3)  # the segments that LENGTHS names
    qkv = random_qkv()
    options = {"sliding_window": window, "scaling": 0.3, "softcap": 0.7 if extra == "softcap" else None}
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0]) if extra == "sinks" else None
    layout = PackedLayout(LENGTHS, [None, 0, 0, 0])
    out, _ = packed_attention(
        torch.nn.Module(), *qkv, None, packed_layout=layout, s_aux=sinks, fused=extra != "eager", **options
    )
    start, expected = prompt, []
    for n in responses:
        whole = [torch.cat([x[:, :, :prompt], x[:, :, start : start + n]], dim=2) for x in qkv]
        alone = written_out(*whole, window=window, scaling=0.3, softcap=options["softcap"], sinks=sinks)
        torch.testing.assert_close(out[:, :prompt], alone[:, :prompt], rtol=1e-5, atol=1e-6)
        expected.append(alone[:, prompt:])
        start += n
    expected = torch.cat(expected, dim=1)
    torch.testing.assert_close(out[:, prompt:], expected, rtol=1e-5, atol=1e-6)
    weight = torch.linspace(-1, 1, expected.numel()).view_as(expected)
    ours = torch.autograd.grad((out[:, prompt:] * weight).sum(), qkv)
    theirs = torch.autograd.grad((expected * weight).sum(), qkv)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_neighbour_changes_nothing_not_even_the_last_bit():
    qkv = [x.detach() for x in random_qkv()]
    before, _ = packed_attention(torch.nn.Module(), *qkv, None, packed_layout=PackedLayout.whole(LENGTHS))
    changed = [torch.cat([x[:, :, :5], torch.full_like(x[:, :, 5:], 1e4)], dim=2) for x in qkv]
    after, _ = packed_attention(torch.nn.Module(), *changed, None, packed_layout=PackedLayout.whole(LENGTHS))
    assert torch.equal(before[:, :5], after[:, :5])
    alone, _ = packed_attention(
        torch.nn.Module(), *(x[:, :, 6:15] for x in qkv), None, packed_layout=PackedLayout.whole([9])
    )
    assert torch.equal(before[:, 6:15], alone)


def test_refuses_to_attend_without_borders():
    with pytest.raises(ValueError, match="without packed_layout"):
        packed_attention(torch.nn.Module(), *random_qkv(), None)


def meta_model(kind, **fields):
    import transformers

    config = getattr(transformers, f"{kind}Config")(num_hidden_layers=2, **fields)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("kind", ["Qwen3", "Gemma2", "GptOss"])
def test_the_kernel_that_was_asked_for_is_packed(kind):
    model = meta_model(kind)
    assert choose_attention(model, "sdpa", pack=True) == AttentionChoice(PACKED, True, "packed")
    assert choose_attention(model, "eager", pack=True) == AttentionChoice(PACKED_EAGER, True, "packed")
    assert choose_attention(model, "flash_attention_2", pack=True) == AttentionChoice(
        "flash_attention_2", True, "flash"
    )


@pytest.mark.parametrize(
    ("kind", "kernel", "reason"),
    [
        ("Qwen3", "sdpa", None),
        ("Gemma2", "eager", "caps its attention logits"),
        ("GptOss", "eager", "attention sinks"),
        ("Qwen3Next", "sdpa", None),
        ("Mamba", "eager", "no fused attention"),
    ],
)
def test_padded_rows_get_a_kernel_that_leaves_nothing_out(kind, kernel, reason):
    choice = choose_attention(meta_model(kind), "sdpa", pack=False)
    assert not choice.packed and choice.implementation == kernel
    assert choice.reason is None if reason is None else reason in choice.reason


@pytest.mark.parametrize("kind", ["Qwen3Next", "Mamba"])
def test_tokens_that_mix_outside_of_attention_are_padded(kind):
    choice = choose_attention(meta_model(kind), "sdpa", pack=True)
    assert not choice.packed and choice.reason is not None


@pytest.mark.parametrize("layer_type", ["chunked_attention", "linear_attention"])
@pytest.mark.parametrize("kernel", ["sdpa", "eager", "flash_attention_2"])
def test_layers_that_look_across_borders_are_not_packed_whatever_the_kernel(layer_type, kernel):
    choice = choose_attention(meta_model("Qwen3", layer_types=[layer_type, "full_attention"]), kernel, pack=True)
    assert not choice.packed and f"layers of type {layer_type}" in choice.reason
