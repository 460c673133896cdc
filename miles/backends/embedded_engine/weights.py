"""The served weights: fused for the forward pass, read and written tensor by tensor under Hugging Face names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from miles.backends.embedded_engine.linear import Linear
from miles.backends.embedded_engine.model_config import ModelConfig, ModelError
from miles.utils.digest import dtype_name


class WeightError(ValueError):
    """Tensors that do not fit the model; the message names every one of them."""


@dataclass
class Slot:
    """Where one Hugging Face tensor lives: its shape, and how to read and write it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]
    write: Callable[[torch.Tensor], object]


@dataclass
class Mlp:
    gate: Linear
    up: Linear
    down: Linear


@dataclass
class Experts:
    """Router [experts, hidden] and one MLP an expert."""

    router: Linear
    experts: list[Mlp]


@dataclass
class Layer:
    input_norm: torch.Tensor  # [hidden]
    post_norm: torch.Tensor  # [hidden]
    qkv: Linear  # [(heads + 2 kv_heads) * head_dim, hidden]
    output: Linear
    q_norm: torch.Tensor | None  # [head_dim]
    k_norm: torch.Tensor | None
    mlp: Mlp | Experts


class Weights:
    """All tensors of one model on one device.

    `slots` maps every name that the checkpoint format has to its storage; `aliases` maps further names that an update
    may use (the tied output matrix, fused expert tensors). `missing` holds names whose content is not valid: all of
    them before loading and after a memory release.
    """

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype):
        self.config, self.device, self.dtype = config, device, dtype
        self.slots: dict[str, Slot] = {}
        self.aliases: dict[str, Slot] = {}
        self._linears: list[Linear] = []
        self._plain_tensors: list[tuple[torch.Tensor, tuple[int, ...]]] = []
        self.epoch = 0  # grows with every change of a tensor: what was computed before is stale
        self.released = False
        self._build()
        self.missing = set(self.slots)

    # ---- construction --------------------------------------------------------------------------------------------

    def _build(self) -> None:
        c = self.config
        self.embedding = self._tensor("model.embed_tokens.weight", (c.vocab_size, c.hidden_size))
        self.layers = [self._layer(i) for i in range(c.num_layers)]
        self.final_norm = self._tensor("model.norm.weight", (c.hidden_size,))
        self.lm_head = self._linear(c.vocab_size, c.hidden_size, bias=False)
        if c.tied_embeddings:
            # One tensor in the checkpoint, two layouts here: the lookup table, and the matrix for the logits.
            table = self.slots["model.embed_tokens.weight"]
            self.slots["model.embed_tokens.weight"] = Slot(table.shape, table.dtype, table.read, self._write_tied)
            self.aliases["lm_head.weight"] = self.slots["model.embed_tokens.weight"]
        else:
            self._rows("lm_head", self.lm_head, slice(0, c.vocab_size), bias=False)

    def _write_tied(self, value: torch.Tensor) -> None:
        self.embedding.copy_(value)
        self.lm_head.write(slice(0, self.config.vocab_size), value)

    def _layer(self, i: int) -> Layer:
        c, prefix = self.config, f"model.layers.{i}"
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        qkv = self._linear(q + 2 * kv, c.hidden_size, bias=c.qkv_bias)
        for name, rows in (("q", slice(0, q)), ("k", slice(q, q + kv)), ("v", slice(q + kv, q + 2 * kv))):
            self._rows(f"{prefix}.self_attn.{name}_proj", qkv, rows, bias=c.qkv_bias)
        output = self._linear(c.hidden_size, q, bias=c.output_bias)
        self._rows(f"{prefix}.self_attn.o_proj", output, slice(0, c.hidden_size), bias=c.output_bias)
        norms: dict[str, torch.Tensor | None] = {"q_norm": None, "k_norm": None}
        if c.qk_norm:
            norms = {n: self._tensor(f"{prefix}.self_attn.{n}.weight", (c.head_dim,)) for n in norms}
        sparse = c.moe is not None and i in c.moe.sparse_layers
        return Layer(
            input_norm=self._tensor(f"{prefix}.input_layernorm.weight", (c.hidden_size,)),
            post_norm=self._tensor(f"{prefix}.post_attention_layernorm.weight", (c.hidden_size,)),
            qkv=qkv,
            output=output,
            mlp=self._experts(f"{prefix}.mlp") if sparse else self._mlp(f"{prefix}.mlp", c.intermediate_size),
            **norms,
        )

    def _mlp(self, prefix: str, size: int) -> Mlp:
        c = self.config
        parts = {}
        for name, (n_out, n_in) in {
            "gate": (size, c.hidden_size),
            "up": (size, c.hidden_size),
            "down": (c.hidden_size, size),
        }.items():
            parts[name] = self._linear(n_out, n_in, bias=c.mlp_bias)
            self._rows(f"{prefix}.{name}_proj", parts[name], slice(0, n_out), bias=c.mlp_bias)
        return Mlp(**parts)

    def _experts(self, prefix: str) -> Experts:
        c, moe = self.config, self.config.moe
        assert moe is not None
        router = self._linear(moe.num_experts, c.hidden_size, bias=False)
        self._rows(f"{prefix}.gate", router, slice(0, moe.num_experts), bias=False)
        experts = [self._mlp(f"{prefix}.experts.{e}", moe.intermediate_size) for e in range(moe.num_experts)]
        self._fused_expert_aliases(prefix, moe.num_experts, moe.intermediate_size)
        return Experts(router, experts)

    def _fused_expert_aliases(self, prefix: str, experts: int, size: int) -> None:
        """Names of models that hold all experts of a layer in two tensors."""
        hidden = self.config.hidden_size

        def slot(e: int, name: str) -> Slot:
            return self.slots[f"{prefix}.experts.{e}.{name}_proj.weight"]

        def write_gate_up(value: torch.Tensor) -> None:
            for e in range(experts):
                slot(e, "gate").write(value[e, :size])
                slot(e, "up").write(value[e, size:])

        def write_down(value: torch.Tensor) -> None:
            for e in range(experts):
                slot(e, "down").write(value[e])

        def read_gate_up() -> torch.Tensor:
            pairs = [torch.cat([slot(e, "gate").read(), slot(e, "up").read()]) for e in range(experts)]
            return torch.stack(pairs)

        def read_down() -> torch.Tensor:
            return torch.stack([slot(e, "down").read() for e in range(experts)])

        gate_up, down = (experts, 2 * size, hidden), (experts, hidden, size)
        self.aliases[f"{prefix}.experts.gate_up_proj"] = Slot(gate_up, self.dtype, read_gate_up, write_gate_up)
        self.aliases[f"{prefix}.experts.down_proj"] = Slot(down, self.dtype, read_down, write_down)

    def _linear(self, n_out: int, n_in: int, *, bias: bool) -> Linear:
        linear = Linear(n_out, n_in, bias=bias, device=self.device, dtype=self.dtype)
        self._linears.append(linear)
        return linear

    def _rows(self, name: str, linear: Linear, rows: slice, *, bias: bool) -> None:
        """Register rows of a fused matrix under the name of the projection that they are."""
        shape = (rows.stop - rows.start, linear.shape[1])
        self.slots[f"{name}.weight"] = Slot(
            shape, self.dtype, lambda: linear.plain()[rows], lambda value: linear.write(rows, value)
        )
        if bias:
            stored = linear.bias
            assert stored is not None
            if not any(stored is tensor for tensor, _ in self._plain_tensors):
                self._plain_tensors.append((stored, tuple(stored.shape)))
            self.slots[f"{name}.bias"] = Slot(
                shape[:1], self.dtype, lambda: stored[rows], lambda value: stored[rows].copy_(value)
            )

    def _tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = torch.zeros(shape, device=self.device, dtype=self.dtype)
        self._plain_tensors.append((tensor, shape))
        self.slots[name] = Slot(shape, self.dtype, lambda: tensor, lambda value: tensor.copy_(value))
        return tensor

    # ---- use -----------------------------------------------------------------------------------------------------

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor as served, under its Hugging Face name. Packed matrices are unpacked to read them."""
        for name, slot in self.slots.items():
            yield name, slot.read()

    def find(self, name: str) -> Slot | None:
        return self.slots.get(name) or self.aliases.get(name)

    def covered_names(self, name: str) -> list[str]:
        """Checkpoint names that a write to `name` fills."""
        if name in self.slots:
            return [name]
        if name == "lm_head.weight":
            return ["model.embed_tokens.weight"]
        prefix, _, fused = name.rpartition(".")
        parts = ("gate", "up") if fused == "gate_up_proj" else ("down",)
        experts = self.config.moe.num_experts if self.config.moe else 0
        return [f"{prefix}.{e}.{p}_proj.weight" for e in range(experts) for p in parts]

    def write(self, name: str, value: torch.Tensor) -> None:
        """Store one checked tensor; `seal` before the next forward pass."""
        slot = self.find(name)
        if slot is None:
            raise WeightError(f"unknown tensor {name!r}")
        self.epoch += 1
        slot.write(value)
        self.missing.difference_update(self.covered_names(name))

    def seal(self) -> None:
        for linear in self._linears:
            linear.seal()

    def release(self) -> None:
        """Free the storage of every tensor; all names become `missing`."""
        for linear in self._linears:
            linear.free()
        for tensor, _ in self._plain_tensors:
            tensor.data = tensor.new_empty(0)
        self.released, self.missing = True, set(self.slots)
        self.epoch += 1

    def restore_storage(self) -> None:
        """Allocate again what `release` freed. The content is zero until it is written."""
        for tensor, shape in self._plain_tensors:
            tensor.data = tensor.new_zeros(shape)
        self.released = False

    def nbytes(self) -> int:
        return sum(_numel(slot.shape) * slot.dtype.itemsize for slot in self.slots.values())


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def check_tensor(weights: Weights, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
    """What is wrong with a tensor that somebody wants to write, or None."""
    slot = weights.find(name)
    if slot is None:
        return f"{name}: the model has no such tensor"
    if tuple(shape) != slot.shape:
        return f"{name}: shape {tuple(shape)}, the model has {slot.shape}"
    if not dtype.is_floating_point:
        return f"{name}: dtype {dtype_name(dtype)}, the model serves {dtype_name(slot.dtype)}"
    return None


def load_directory(weights: Weights, model_path: str | Path) -> None:
    """Fill the weights from the safetensors files of a Hugging Face directory.

    Raises: ModelError or WeightError naming every missing, unknown or ill-shaped tensor; nothing is written then.
    """
    from safetensors import safe_open

    path = Path(model_path)
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{path} has no *.safetensors file; save the model with save_pretrained first")
    problems: list[str] = []
    found: set[str] = set()
    for file in files:
        with safe_open(file, framework="pt") as f:
            for name in f.keys():  # noqa: SIM118 (not a dict)
                if name.endswith("rotary_emb.inv_freq"):
                    continue  # a buffer that old checkpoints carry; it follows from the config
                piece = f.get_slice(name)
                problem = check_tensor(weights, name, tuple(piece.get_shape()), torch.float32)
                if problem:
                    problems.append(f"{file.name}: {problem}")
                else:
                    found.update(weights.covered_names(name))
    problems += [f"{name}: missing" for name in weights.slots if name not in found]
    if problems:
        raise WeightError(f"{path} does not fit its config.json: " + "; ".join(problems))
    for file in files:
        with safe_open(file, framework="pt") as f:
            for name in f.keys():  # noqa: SIM118
                if weights.find(name) is not None:
                    weights.write(name, f.get_tensor(name))
    weights.seal()
