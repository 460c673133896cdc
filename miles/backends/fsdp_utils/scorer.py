"""Forward passes over micro-batches: log-probs of response tokens, and logits for losses that want them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from miles.backends.fsdp_utils.layout import build_inputs
from miles.backends.fsdp_utils.loading import LoadedPolicy
from miles.backends.training_utils.backend import TrainData
from miles.backends.training_utils.logprobs import (
    chunk_rows,
    linear_log_probs,
    log_probs_from_logits,
    loss_temperature,
)


@dataclass(frozen=True)
class Scores:
    """Flat over the response tokens of a micro-batch, fp32 `[R]`; entropy in nats, or None."""

    log_probs: torch.Tensor
    entropy: torch.Tensor | None


def score_micro_batch(
    args: Any,
    loaded: LoadedPolicy,
    columns: TrainData,
    indices: Sequence[int],
    device: torch.device,
    *,
    with_entropy: bool = False,
) -> Scores:
    """Run the model over samples `indices`. Differentiable where gradients are enabled. Collective."""
    tokens, responses = _sequences(columns, indices)
    inputs, targets = build_inputs(tokens, responses, device, packed=loaded.packed, share_prompts=loaded.shares_prompts)
    temperature = loss_temperature(args)

    def head(hidden: torch.Tensor | None, module: nn.Module, logits: torch.Tensor | None) -> Any:
        if hidden is not None and isinstance(module, nn.Linear):
            chunk = chunk_rows(args, module.out_features)
            return linear_log_probs(
                hidden,
                module.weight,
                targets,
                bias=module.bias,
                temperature=temperature,
                chunk=chunk,
                with_entropy=with_entropy,
            )
        logits = module(hidden) if logits is None else logits
        chunk = chunk_rows(args, logits.shape[-1])
        return log_probs_from_logits(logits, targets, temperature=temperature, chunk=chunk, with_entropy=with_entropy)

    return Scores(*loaded.module(inputs, head))


def values_of_micro_batch(
    loaded: LoadedPolicy, columns: TrainData, indices: Sequence[int], device: torch.device
) -> torch.Tensor:
    """A critic's value of the state before each response token, fp32 `[R]`. Differentiable. Collective."""
    tokens, responses = _sequences(columns, indices)
    inputs, _ = build_inputs(tokens, responses, device, packed=loaded.packed, share_prompts=loaded.shares_prompts)

    def head(hidden: torch.Tensor | None, module: nn.Module, logits: torch.Tensor | None) -> torch.Tensor:
        return module(hidden)[:, 0].float()

    return loaded.module(inputs, head)


def logits_of_micro_batch(
    loaded: LoadedPolicy, columns: TrainData, indices: Sequence[int], device: torch.device
) -> torch.Tensor:
    """Logits at every position: `[1, T, V]` for packed rows, `[B, S, V]` for padded ones. Collective."""
    tokens, responses = _sequences(columns, indices)
    inputs, _ = build_inputs(tokens, responses, device, packed=loaded.packed)
    shape = inputs.input_ids.shape
    everywhere = torch.arange(inputs.input_ids.numel(), device=device)
    inputs = type(inputs)(inputs.input_ids, inputs.position_ids, everywhere, inputs.packed)

    def head(hidden: torch.Tensor | None, module: nn.Module, logits: torch.Tensor | None) -> torch.Tensor:
        return module(hidden) if logits is None else logits

    return loaded.module(inputs, head).view(*shape, -1)


def _sequences(columns: TrainData, indices: Sequence[int]) -> tuple[list[torch.Tensor], list[int]]:
    tokens = [torch.as_tensor(columns["tokens"][i], dtype=torch.int64) for i in indices]
    return tokens, [int(columns["response_lengths"][i]) for i in indices]
