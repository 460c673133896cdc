"""A tiny causal model and a rank-by-rank simulation of one optimizer step, for comparing ways to split a batch."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from miles.backends.training_utils.advantages import compute_advantages
from miles.backends.training_utils.backend import TrainParallelConfig
from miles.backends.training_utils.batching.packing import PackedBatch, pack_micro_batch, pad_micro_batch
from miles.backends.training_utils.batching.planner import plan_batches
from miles.backends.training_utils.batching.shards import split_train_data
from miles.backends.training_utils.columns import MicroBatch, check_columns
from miles.backends.training_utils.logprobs import linear_log_probs, loss_temperature
from miles.backends.training_utils.loss_hub.corrections import local_step_sums
from miles.backends.training_utils.loss_hub.mis import MISSettings
from miles.backends.training_utils.loss_hub.reducers import StepTotals
from miles.backends.training_utils.loss_hub.sft_loss import sft_objective
from miles.backends.training_utils.loss_hub.value_loss import value_objective
from miles.backends.training_utils.metrics import StepMetrics
from miles.backends.training_utils.objective import needs_entropy, policy_objective

VOCAB, HIDDEN = 23, 12


def make_args(**changes: Any) -> SimpleNamespace:
    """The flags that these functions read, at their public defaults."""
    args = dict(
        advantage_estimator="grpo",
        loss_type="policy_loss",
        eps_clip=0.2,
        eps_clip_high=None,
        eps_clip_c=None,
        kl_coef=0.0,
        use_kl_loss=False,
        kl_loss_coef=0.0,
        kl_loss_type="k1",
        use_unbiased_kl=False,
        entropy_coef=0.0,
        observe_training_entropy=False,
        gamma=1.0,
        lambd=1.0,
        normalize_advantages=False,
        calculate_per_token_loss=False,
        use_rollout_logprobs=False,
        skip_actor_forward_only=False,
        use_tis=False,
        tis_clip=2.0,
        tis_clip_low=0.0,
        custom_tis_function_path=None,
        get_mismatch_metrics=False,
        use_opsm=False,
        opsm_delta=1e-4,
        value_clip=0.2,
        use_opd=False,
        opd_kl_coef=1.0,
        global_batch_size=4,
        micro_batch_size=1,
        use_dynamic_batch_size=False,
        max_tokens_per_gpu=None,
        balance_data=False,
        balance_by_flops=False,
        allow_partial_train_step=False,
        use_dynamic_global_batch_size=False,
        num_steps_per_rollout=None,
        rollout_temperature=1.0,
        qkv_format="thd",
        check_for_nan_in_loss_and_grad=True,
    )
    unknown = (
        set(changes)
        - set(args)
        - {
            "custom_loss_function_path",
            "custom_pg_loss_reducer_function_path",
            "custom_reward_post_process_path",
            "grpo_std_normalization",
            "rewards_normalization",
            "n_samples_per_prompt",
            "hf_checkpoint",
            "reward_key",
            "log_probs_chunk_size",
            "keep_old_actor",
            "log_correct_samples",
            "compute_advantages_and_returns",
            *(f.name for f in dataclasses.fields(MISSettings)),
        }
    )
    assert not unknown, unknown
    return SimpleNamespace(**{**args, **changes})


class ToyModel(nn.Module):
    """Hidden state at t is a fixed nonlinear mean of the embeddings up to t of the same sequence."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embedding = nn.Parameter(torch.randn(VOCAB, HIDDEN, generator=generator))
        self.mix = nn.Parameter(torch.randn(HIDDEN, HIDDEN, generator=generator) / HIDDEN**0.5)
        self.head = nn.Parameter(torch.randn(VOCAB, HIDDEN, generator=generator) / 2)

    def sequence(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding[ids]
        counts = torch.arange(1, len(ids) + 1, dtype=x.dtype)[:, None]
        return torch.tanh((x + x.cumsum(0) / counts) @ self.mix)

    def hidden(self, packed: PackedBatch) -> torch.Tensor:
        if packed.cu_seqlens is not None:
            borders = packed.cu_seqlens.tolist()
            pieces = [self.sequence(packed.input_ids[0, a:b]) for a, b in itertools.pairwise(borders)]
            return torch.cat(pieces)
        return torch.cat([self.sequence(row) for row in packed.input_ids])


def make_columns(count: int = 12, *, siblings: bool = True, seed: int = 3, reference: bool = False) -> dict[str, Any]:
    """Ragged samples with gaps in their masks; with `siblings`, some executions yield two samples."""
    g = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=g))

    responses = [integer(2, 9) for _ in range(count)]
    totals = [r + integer(1, 6) for r in responses]
    tokens = [torch.randint(0, VOCAB, (n,), generator=g).tolist() for n in totals]
    masks = [[1, *(torch.rand(r - 1, generator=g) < 0.7).int().tolist()] for r in responses]
    rollout_ids = list(range(count))
    if siblings:
        rollout_ids = [i - 1 if i % 3 == 1 else i for i in range(count)]
    sums = {r: sum(sum(m) for m, q in zip(masks, rollout_ids, strict=True) if q == r) for r in set(rollout_ids)}
    rewards = torch.randn(count, generator=g).tolist()
    rewards = [rewards[rollout_ids.index(r)] for r in rollout_ids]

    def noisy(scale: float) -> list[list[float]]:
        return [(-3.0 + scale * torch.randn(r, generator=g)).tolist() for r in responses]

    columns = dict(
        tokens=tokens,
        total_lengths=totals,
        response_lengths=responses,
        loss_masks=masks,
        rewards=rewards,
        raw_reward=rewards,
        truncated=[0] * count,
        rollout_ids=rollout_ids,
        rollout_mask_sums=[sums[r] for r in rollout_ids],
        rollout_log_probs=noisy(0.5),
        log_probs=noisy(0.5),
        version_spans=[[(1, 0, r)] for r in responses],
    )
    if reference:
        columns["ref_log_probs"] = noisy(0.5)
    columns["values"] = noisy(0.5)
    return columns


def num_rollouts(columns: dict[str, Any]) -> int:
    return len(set(columns["rollout_ids"]))


def run_step(
    args: Any, columns: dict[str, Any], *, dp: int = 1, layout: str = "packed", pad_multiple: int = 1, model: Any = None
) -> tuple[list[torch.Tensor], dict[str, float]]:
    """Gradients and metrics of one step over `dp` simulated ranks, summed as the objective's contract says."""
    model = model or ToyModel()
    plan = plan_batches(columns, TrainParallelConfig(dp), args)
    shards = split_train_data(columns, plan, rollout_id=0)
    scored = _advantages_on_all_ranks(args, shards)
    sums = _correction_sums(args, shards)
    ranks = []
    for shard, advantages in zip(shards, scored, strict=True):
        if advantages is not None:
            advantages.write_to(shard.columns)
        metrics = StepMetrics()
        step = shard.steps[0]
        totals = StepTotals(step.num_rollouts, step.num_tokens, sums)
        for indices in step.micro_batches:
            batch = MicroBatch.from_columns(args, shard.columns, indices)
            lay_out = pack_micro_batch if layout == "packed" else pad_micro_batch
            packed = lay_out(
                [shard.columns["tokens"][i] for i in indices], batch.response_lengths, pad_multiple=pad_multiple
            )
            hidden = model.hidden(packed)[packed.rows]
            wanted, _ = needs_entropy(args)
            log_probs, entropy = linear_log_probs(
                hidden, model.head, packed.targets, temperature=loss_temperature(args), with_entropy=wanted
            )
            if args.loss_type == "sft_loss":
                objective = sft_objective(args, batch, log_probs, totals)
            elif args.loss_type == "value_loss":  # the log-probs stand in for what a value head gives
                objective = value_objective(args, batch, log_probs, totals)
            else:
                objective = policy_objective(args, batch, log_probs, entropy, totals)
            objective.loss.backward()
            metrics.merge(objective.metrics)
        ranks.append(metrics)
    return [p.grad.clone() for p in model.parameters()], reduce_over(ranks)


def _advantages_on_all_ranks(args: Any, shards: list) -> list:
    """Whitening needs every rank's sums; here all ranks live in one process, so whiten over their union."""
    for shard in shards:
        check_columns(shard.columns)
    if args.loss_type == "sft_loss":
        return [None] * len(shards)
    union: dict[str, Any] = {}
    for shard in shards:
        for name, column in shard.columns.items():
            union.setdefault(name, []).extend(column)

    def tensors(name: str) -> list[torch.Tensor] | None:
        return [torch.tensor(x) for x in union[name]] if name in union else None

    whole = compute_advantages(args, union, tensors("log_probs"), tensors("ref_log_probs"))
    results, start = [], 0
    for shard in shards:
        stop = start + len(shard.columns["tokens"])
        results.append(type(whole)(whole.advantages[start:stop], whole.returns[start:stop], whole.kl[start:stop], None))
        start = stop
    return results


def _correction_sums(args: Any, shards: list) -> torch.Tensor | None:
    """What a correction sums over the step, rank by rank."""
    total = None
    for shard in shards:
        batch = MicroBatch.from_columns(args, shard.columns, range(len(shard.columns["tokens"])))
        local = local_step_sums(args, batch.get("log_probs"), batch.get("rollout_log_probs"), batch.loss_masks)
        if local is not None:
            total = local if total is None else total + local
    return total


def reduce_over(ranks: list[StepMetrics]) -> dict[str, float]:
    """What every rank gets from `reduce`, with the other ranks' vectors gathered by hand."""
    sent: list[torch.Tensor] = []

    def record(vector: torch.Tensor) -> torch.Tensor:
        sent.append(vector)
        return vector[None]

    for metrics in ranks:
        metrics.reduce(record)
    return ranks[0].reduce(lambda _: torch.stack(sent))
