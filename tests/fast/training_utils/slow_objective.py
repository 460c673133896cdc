"""The whole objective of a step in plain Python: loops over samples and tokens, floats, nothing shared with the product.

From the model's log-softmax rows and the batch's columns to the loss. Only what the configurations of
`test_written_out.py` need.
"""

# ruff: noqa: B905
from __future__ import annotations

import math
from typing import Any

Rows = list[list[float]]


def step_loss(args: Any, columns: dict[str, Any], log_softmax: list[Rows]) -> float:
    """`log_softmax[i][t]`: the log-probs of the whole vocabulary before token t of response i."""
    prompts = [total - response for total, response in zip(columns["total_lengths"], columns["response_lengths"])]
    log_probs = [
        [rows[t][tokens[start + t]] for t in range(len(rows))]
        for rows, tokens, start in zip(log_softmax, columns["tokens"], prompts)
    ]
    if args.loss_type == "sft_loss":
        return _reduce(args, columns, [[-x for x in row] for row in log_probs])
    advantages, returns = _advantages(args, columns)
    if args.loss_type == "value_loss":
        return _reduce(args, columns, _value_losses(args, columns, log_probs, returns))
    loss = _reduce(args, columns, _policy_losses(args, columns, log_probs, advantages))
    if args.entropy_coef:
        entropy = [[-sum(math.exp(x) * x for x in row) for row in rows] for rows in log_softmax]
        loss -= args.entropy_coef * _reduce(args, columns, entropy)
    if args.use_kl_loss:
        rows = []
        for ps, qs, olds in zip(log_probs, columns["ref_log_probs"], columns["log_probs"]):
            row = [_kl(args.kl_loss_type, p - q) for p, q in zip(ps, qs)]
            if args.use_unbiased_kl:
                row = [k * math.exp(p - o) for k, p, o in zip(row, ps, olds)]
            rows.append(row)
        loss += args.kl_loss_coef * _reduce(args, columns, rows)
    return loss


def _reduce(args: Any, columns: dict[str, Any], rows: Rows) -> float:
    """Mean over executions of token means, or over all trained tokens."""
    executions: dict[int, list[float]] = {}
    for execution, row, mask in zip(columns["rollout_ids"], rows, columns["loss_masks"]):
        for x, m in zip(row, mask):
            if m:
                executions.setdefault(execution, []).append(x)
    if args.calculate_per_token_loss:
        every = [x for xs in executions.values() for x in xs]
        return sum(every) / len(every)
    return sum(sum(xs) / len(xs) for xs in executions.values()) / len(executions)


def _kl(kind: str, d: float) -> float:
    return {"k1": d, "k2": d * d / 2}.get(kind, math.exp(-d) - 1 + d)


def _advantages(args: Any, columns: dict[str, Any]) -> tuple[Rows, Rows]:
    advantages, returns = [], []
    for i, (reward, mask) in enumerate(zip(columns["rewards"], columns["loss_masks"])):
        kl = [0.0] * len(mask)
        if args.kl_coef:
            kl = [_kl(args.kl_loss_type, p - q) for p, q in zip(columns["log_probs"][i], columns["ref_log_probs"][i])]
        values = columns["values"][i]
        a, g = [0.0] * len(mask), [0.0] * len(mask)
        trained = [t for t in range(len(mask)) if mask[t]]
        future = next_value = 0.0
        for t in reversed(trained):
            r = reward if t == trained[-1] else 0.0
            if args.advantage_estimator == "reinforce_plus_plus":
                future = r - args.kl_coef * kl[t] + args.gamma * future
                a[t] = g[t] = future
            elif args.advantage_estimator == "ppo":
                future = r + args.gamma * next_value - values[t] + args.gamma * args.lambd * future
                a[t], g[t], next_value = future, future + values[t], values[t]
            elif args.advantage_estimator == "reinforce_plus_plus_baseline":
                a[t] = g[t] = reward - args.kl_coef * kl[t]
            else:
                a[t] = g[t] = reward
        advantages.append(a)
        returns.append(g)
    if args.normalize_advantages:
        kept = [x for row, mask in zip(advantages, columns["loss_masks"]) for x, m in zip(row, mask) if m]
        mean = sum(kept) / len(kept)
        std = math.sqrt(sum((x - mean) ** 2 for x in kept) / (len(kept) - 1) + 1e-8)
        advantages = [[(x - mean) / std for x in row] for row in advantages]
    return advantages, returns


def _value_losses(args: Any, columns: dict[str, Any], values: Rows, returns: Rows) -> Rows:
    rows = []
    for vs, olds, gs in zip(values, columns["values"], returns):
        near = [o + min(max(v - o, -args.value_clip), args.value_clip) for v, o in zip(vs, olds)]
        rows.append([max((v - g) ** 2, (n - g) ** 2) for v, n, g in zip(vs, near, gs)])
    return rows


def _policy_losses(args: Any, columns: dict[str, Any], log_probs: Rows, advantages: Rows) -> Rows:
    low, high = 1 - args.eps_clip, 1 + (args.eps_clip if args.eps_clip_high is None else args.eps_clip_high)
    olds = columns["rollout_log_probs"] if args.use_rollout_logprobs else columns["log_probs"]
    rows = []
    for i, (ps, os, mask, advantage) in enumerate(zip(log_probs, olds, columns["loss_masks"], advantages)):
        trained = [t for t in range(len(mask)) if mask[t]]
        drift = sum(ps[t] - os[t] for t in trained) / max(len(trained), 1)
        row = [0.0] * len(mask)
        for t in trained:
            ratio = math.exp(drift if args.advantage_estimator == "gspo" else ps[t] - os[t])
            weight, a = min(max(ratio, low), high), advantage[t]
            if args.advantage_estimator == "cispo":
                row[t] = -weight * a * ps[t]
            else:
                row[t] = max(-ratio * a, -weight * a)
                if args.eps_clip_c is not None and a < 0:
                    row[t] = min(row[t], -args.eps_clip_c * a)
            if args.use_opsm and a < 0 and -drift > args.opsm_delta:
                row[t] = 0.0
            if args.use_tis:
                m = math.exp(columns["log_probs"][i][t] - columns["rollout_log_probs"][i][t])
                if args.custom_tis_function_path:
                    row[t] *= m if args.tis_clip_low <= m <= args.tis_clip else 0.0
                else:
                    row[t] *= min(max(m, args.tis_clip_low), args.tis_clip)
        rows.append(row)
    return rows
