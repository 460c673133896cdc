"""What a server that joins tensors must answer, against the joined tensors themselves."""

from __future__ import annotations

import hashlib
import random

import pytest
import torch

from miles.weight_update.served_digests import ServedDigestBuilder, ServedDigests
from miles.weight_update.tile_hash import tile_hashes
from miles.weight_update.verification import Problem

EXPERTS = 3


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def sent_tensors() -> dict[str, torch.Tensor]:
    def random_of(*shape: int) -> torch.Tensor:
        return torch.randn(*shape)

    layer = "model.layers.0."
    tensors = {
        "model.embed_tokens.weight": random_of(64, 4),
        "lm_head.weight": random_of(64, 4),
        "model.norm.weight": random_of(4),
        layer + "self_attn.q_proj.weight": random_of(8, 4),
        layer + "self_attn.k_proj.weight": random_of(2, 4),
        layer + "self_attn.v_proj.weight": random_of(2, 4),
        layer + "self_attn.q_proj.bias": random_of(8),
        layer + "self_attn.k_proj.bias": random_of(2),
        layer + "self_attn.v_proj.bias": random_of(2),
        layer + "mlp.gate.weight": random_of(EXPERTS, 4),
        "model.layers.1.mlp.gate_proj.weight": random_of(6, 4),
        "model.layers.1.mlp.up_proj.weight": random_of(6, 4),
        "model.layers.1.mlp.down_proj.weight": random_of(4, 6),
    }
    for i in range(EXPERTS):
        tensors[f"{layer}mlp.experts.{i}.gate_proj.weight"] = random_of(6, 4)
        tensors[f"{layer}mlp.experts.{i}.up_proj.weight"] = random_of(6, 4)
        tensors[f"{layer}mlp.experts.{i}.down_proj.weight"] = random_of(4, 6)
    return tensors


def served_tensors(t: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As SGLang keeps them."""
    attention, experts = "model.layers.0.self_attn.", "model.layers.0.mlp.experts."
    kept = {n: t[n] for n in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight")}
    kept |= {n: t[n] for n in ("model.layers.0.mlp.gate.weight", "model.layers.1.mlp.down_proj.weight")}
    for kind in ("weight", "bias"):
        kept[f"{attention}qkv_proj.{kind}"] = torch.cat([t[f"{attention}{p}_proj.{kind}"] for p in "qkv"])
    gate_up = [t[f"model.layers.1.mlp.{p}_proj.weight"] for p in ("gate", "up")]
    kept["model.layers.1.mlp.gate_up_proj.weight"] = torch.cat(gate_up)
    w13 = [torch.cat([t[f"{experts}{i}.{p}_proj.weight"] for p in ("gate", "up")]) for i in range(EXPERTS)]
    kept[experts + "w13_weight"] = torch.stack(w13)
    kept[experts + "w2_weight"] = torch.stack([t[f"{experts}{i}.down_proj.weight"] for i in range(EXPERTS)])
    return kept


def tile_hash(data: torch.Tensor) -> str:
    return tile_hashes([[data]])[0]


def foretell(tensors: dict[str, torch.Tensor], form: str = "served") -> ServedDigests:
    builder = ServedDigestBuilder(form)
    for name, tensor in tensors.items():
        builder.add(name, tensor)
    return builder.finish()


@pytest.fixture
def sent() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return sent_tensors()


@pytest.fixture
def checksums(sent) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in served_tensors(sent).items()}


@pytest.mark.parametrize("seed", range(3))
def test_a_whole_update_is_recognised_in_any_order_of_sending(sent, checksums, seed):
    names = list(sent)
    random.Random(seed).shuffle(names)
    assert foretell({name: sent[name] for name in names}).compare(checksums) == []


def test_a_server_that_joins_nothing_is_recognised_too(sent):
    dense = {n: t for n, t in sent.items() if ".experts." not in n}
    assert foretell(dense).compare({n: digest(t) for n, t in dense.items()}) == []


@pytest.mark.parametrize(
    "part", ["model.layers.0.self_attn.k_proj.weight", "model.layers.0.mlp.experts.1.up_proj.weight", "lm_head.weight"]
)
def test_one_changed_value_anywhere_is_found(sent, checksums, part):
    sent[part][-1, -1] += 1e-6
    (mismatch,) = foretell(sent).compare(checksums)
    assert mismatch.problem is Problem.DIFFERENT


def test_a_part_that_was_never_sent_leaves_its_whole_unproven(sent, checksums):
    del sent["model.layers.0.self_attn.v_proj.bias"]
    found = {m.name: m.problem for m in foretell(sent).compare(checksums)}
    assert found["model.layers.0.self_attn.qkv_proj.bias"] is Problem.UNEXPECTED


def test_a_tensor_that_the_server_does_not_keep_is_missing(sent, checksums):
    sent["model.layers.2.self_attn.o_proj.weight"] = torch.ones(2, 2)
    (mismatch,) = foretell(sent).compare(checksums)
    assert (mismatch.name, mismatch.problem) == ("model.layers.2.self_attn.o_proj.weight", Problem.MISSING)


def test_a_vocabulary_is_padded_with_zeros():
    embedding = torch.randn(70, 4)
    padded = torch.cat([embedding, torch.zeros(58, 4)])
    assert (
        foretell({"model.embed_tokens.weight": embedding}).compare({"model.embed_tokens.weight": digest(padded)}) == []
    )


def test_tied_embeddings_may_be_listed_once_or_twice_but_must_be_equal():
    weight = torch.randn(64, 4)
    one = {"model.embed_tokens.weight": digest(weight)}
    both = one | {"lm_head.weight": digest(weight)}
    assert foretell({"model.embed_tokens.weight": weight}).compare(both) == []
    assert foretell({"model.embed_tokens.weight": weight, "lm_head.weight": weight}).compare(one) == []
    untied = foretell({"model.embed_tokens.weight": weight, "lm_head.weight": weight + 1}).compare(one)
    assert [m.problem for m in untied] == [Problem.MISSING]


def test_several_senders_make_one_answer(sent, checksums):
    first = {n: t for n, t in sent.items() if ".layers.1." not in n}
    second = {n: t for n, t in sent.items() if ".layers.1." in n}
    merged = ServedDigests.merged([foretell(first), foretell(second)])
    assert merged is not None and merged.compare(checksums) == []
    assert ServedDigests.merged([]) is None


def test_on_a_gpu_the_same_joins_have_another_digest(sent):
    checksums = {n: tile_hash(t.contiguous().view(-1).view(torch.uint8)) for n, t in served_tensors(sent).items()}
    assert foretell(sent, "served-gpu").compare(checksums) == []
    sent["model.layers.0.self_attn.k_proj.weight"][0, 0] += 1e-6
    (mismatch,) = foretell(sent, "served-gpu").compare(checksums)
    assert (mismatch.name, mismatch.problem) == ("model.layers.0.self_attn.qkv_proj.weight", Problem.DIFFERENT)


def test_a_padded_vocabulary_on_a_gpu():
    embedding = torch.randn(70, 4)
    padded = torch.cat([embedding, torch.zeros(58, 4)]).view(-1).view(torch.uint8)
    sent = {"model.embed_tokens.weight": embedding}
    assert foretell(sent, "served-gpu").compare({"model.embed_tokens.weight": tile_hash(padded)}) == []


# Of random bytes, as SGLang 0.5.16 computed them on an H200: one word, less than a tile, exactly one, many and a rest.
@pytest.mark.parametrize(
    ("nbytes", "digest"),
    [
        (4, "d8097d9413bc9b31"),
        (1000, "f24e5e08f748bf13"),
        (32768, "636b2d513320d9ec"),
        (1234567, "d943652dc8ca96e6"),
    ],
)
def test_the_digest_is_what_the_gpu_kernel_computes(nbytes, digest, monkeypatch):
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(nbytes))
    assert tile_hash(data) == digest
    monkeypatch.setattr("miles.weight_update.tile_hash._CHUNK_TILES", 3)
    other = torch.ones(40_000, dtype=torch.uint8)
    together = tile_hashes([[other], [data[:3], data[3:]], [other]])
    assert together == [tile_hash(other), digest, tile_hash(other)], "however it is cut, and whatever is beside it"
