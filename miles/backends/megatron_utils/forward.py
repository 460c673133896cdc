"""Forward passes through megatron-core's pipeline schedules: log-probs of response tokens, with or without backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import unwrap_model
from torch import Tensor

from miles.backends.megatron_utils.layout import Layout
from miles.backends.megatron_utils.micro_batch import ModelInput, build_input, padded_tokens
from miles.backends.training_utils.backend import TrainData
from miles.backends.training_utils.logprobs import chunk_rows, loss_temperature
from miles.backends.training_utils.vocab_parallel import VocabShard, vocab_parallel_log_probs

# (number of the micro-batch, its input, logits of this rank's part of the vocabulary) -> (loss, what to hand back)
OnLogits = Callable[[int, ModelInput, Tensor], tuple[Tensor, Any]]


class Pipeline:
    """The model's chunks on this rank, run over micro-batches together with the other ranks."""

    def __init__(self, args: Any, chunks: Sequence[Any], layout: Layout, device: torch.device, vocab: int) -> None:
        """`chunks`: wrapped in DDP or not; `vocab`: tokens of the model, padding excluded."""
        self.args, self.chunks, self.layout, self.device, self.vocab = args, list(chunks), layout, device, vocab
        self.packed = getattr(args, "qkv_format", "thd") == "thd"

    def run(
        self,
        columns: TrainData,
        micro_batches: Sequence[Sequence[int]],
        on_logits: OnLogits,
        *,
        forward_only: bool,
        all_rows: bool = False,
    ) -> list[Any]:
        """Run all micro-batches of a step. Collective.

        Args:
            on_logits: called on the last stage for each micro-batch, with logits `[r, vocab share]` of the rows that
                predict response tokens, or with those of every token, `[B, S, vocab share]`.
            all_rows: whether the logits of every token are wanted.
        Returns: what `on_logits` handed back, one a micro-batch; empty on other stages.
        """
        length = self._common_length(columns, micro_batches)
        inputs = [
            build_input(columns, mb, self.layout, self.device, packed=self.packed, length=length)
            for mb in micro_batches
        ]
        step = self._forward_step(on_logits, all_rows)
        iterators = [iter(enumerate(inputs)) for _ in self.chunks]
        first = inputs[0].input_ids
        several = len(self.chunks) > 1
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iterators if several else iterators[0],
            model=self.chunks if several else self.chunks[0],
            num_microbatches=len(inputs),
            seq_length=first.shape[1] * self.layout.cp_size,
            micro_batch_size=first.shape[0],
            forward_only=forward_only,
        )

    def num_tokens(self, columns: TrainData, micro_batches: Sequence[Sequence[int]]) -> int:
        """Tokens that go through the model, padding included, over the ranks that share these samples."""
        length = self._common_length(columns, micro_batches)
        rows = [
            (1 if self.packed else len(mb)) * (length or padded_tokens(columns, mb, self.layout, packed=self.packed))
            for mb in micro_batches
        ]
        return sum(rows)

    def _common_length(self, columns: TrainData, micro_batches: Sequence[Sequence[int]]) -> int | None:
        """Interleaved stages exchange two messages at once and tell their shapes apart by nothing: all are equal then."""
        if len(self.chunks) == 1:
            return None
        return max(padded_tokens(columns, mb, self.layout, packed=self.packed) for mb in micro_batches)

    def _forward_step(self, on_logits: OnLogits, all_rows: bool) -> Callable[..., Any]:
        def step(data: Iterator[tuple[int, ModelInput]], model: Any) -> tuple[Tensor, Callable[..., Any]]:
            number, batch = next(data)
            chunk = unwrap_model(model)
            selected = getattr(chunk, "post_process", False) and self._can_select() and not all_rows
            with _only_rows(chunk.output_layer, batch.rows) if selected else contextlib.nullcontext():
                output = model(batch.input_ids, batch.position_ids, None, packed_seq_params=batch.packed)

            def loss(logits: Tensor) -> tuple[Tensor, Tensor, Any]:
                if not all_rows:
                    logits = logits.flatten(0, 1)
                    logits = logits if selected else logits[batch.rows]
                value, handed = on_logits(number, batch, logits)
                # No tokens: the loss is a sum of contributions already, which megatron-core is not to divide again.
                return value, torch.zeros((), dtype=torch.int, device=value.device), handed

            return output, loss

        return step

    def _can_select(self) -> bool:
        """Whether the output layer's input is whole sequences; under sequence parallelism each rank has a share."""
        return not self.layout.sequence_parallel

    # ---- log-probs -----------------------------------------------------------------------------------------------

    def log_probs(self, batch: ModelInput, logits: Tensor, *, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        """fp32 `[R]` of all response tokens of a micro-batch, and their entropy or None; the same on tensor- and
        context-parallel ranks, differentiable with respect to this rank's logits. Collective over them."""
        size = logits.shape[-1]
        shard = VocabShard(
            self.layout.tp_rank * size, size, self.vocab, parallel_state.get_tensor_model_parallel_group()
        )
        log_probs, entropy = vocab_parallel_log_probs(
            logits,
            batch.targets,
            shard,
            temperature=loss_temperature(self.args),
            chunk=chunk_rows(self.args, size),
            with_entropy=with_entropy,
        )
        whole = batch.to_all_responses(log_probs)
        return whole, None if entropy is None else batch.to_all_responses(entropy)

    @torch.no_grad()
    def score(
        self, columns: TrainData, micro_batches: Sequence[Sequence[int]], *, with_entropy: bool
    ) -> list[tuple[Tensor, Tensor | None]]:
        """Log-probs `[R]` and entropy of each micro-batch, on the last stage; nothing on others. Collective."""

        def on_logits(number: int, batch: ModelInput, logits: Tensor) -> tuple[Tensor, Any]:
            values = self.log_probs(batch, logits, with_entropy=with_entropy)
            return values[0].new_zeros(()), values

        for chunk in self.chunks:
            chunk.eval()
        return self.run(columns, micro_batches, on_logits, forward_only=True)


@contextlib.contextmanager
def _only_rows(output_layer: Any, rows: Tensor) -> Iterator[None]:
    """Let the output layer see `[r, 1, hidden]`: only tokens that predict something."""

    def select(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, *others = args  # [S, B, hidden], while rows count along [B, S]
        return (hidden.transpose(0, 1).flatten(0, 1)[rows][:, None], *others)

    handle = output_layer.register_forward_pre_hook(select)
    try:
        yield
    finally:
        handle.remove()
