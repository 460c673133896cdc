"""Three samples by hand, two of them one execution, and the policy loss on them written out in plain Python."""

from __future__ import annotations

import math

import torch

from miles.backends.training_utils.columns import MicroBatch
from miles.backends.training_utils.loss_hub.reducers import StepTotals
from miles.backends.training_utils.objective import policy_objective

NAN, INF = float("nan"), float("inf")

LOG_PROBS = [[-1.0, -0.2, -2.0], [-0.7, -3.0], [-1.1]]
OLD = [[-1.5, -0.9, -1.9], [-0.6, -2.0], [-1.1]]
ROLLOUT = [[-1.4, -0.2, -2.2], [-0.7, -2.9], [-1.0]]
REF = [[-1.2, -0.4, -1.0], [-0.1, -2.5], [-2.0]]
ADVANTAGES = [[1.0, 1.0, 1.0], [-2.0, -2.0], [0.5]]
MASKS = [[1, 0, 1], [1, 1], [1]]
SUMS = [4, 4, 1]  # the first two samples are one execution
TOTALS = StepTotals(num_rollouts=2, num_tokens=5)


def flat(rows):
    return [x for row in rows for x in row]


def columns(**changes):
    base = dict(
        tokens=[[0] * (len(m) + 2) for m in MASKS],
        total_lengths=[len(m) + 2 for m in MASKS],
        response_lengths=[len(m) for m in MASKS],
        loss_masks=MASKS,
        rollout_mask_sums=SUMS,
        log_probs=OLD,
        rollout_log_probs=ROLLOUT,
        ref_log_probs=REF,
        advantages=ADVANTAGES,
    )
    return {k: v for k, v in {**base, **changes}.items() if v is not None}


def evaluate(args, log_probs=None, entropy=None, *, columns_=None, totals=TOTALS, **kwargs):
    """(loss, gradient by the log-probs, metrics)."""
    leaf = torch.tensor(flat(log_probs or LOG_PROBS), requires_grad=True)
    cols = columns_ or columns()
    batch = MicroBatch.from_columns(args, cols, range(len(cols["tokens"])))
    objective = policy_objective(args, batch, leaf, entropy, totals, **kwargs)
    (grad,) = torch.autograd.grad(objective.loss, leaf)
    return objective.loss.item(), grad, objective.metrics.reduce()


def slow_token_losses(args, old=OLD, log_probs=LOG_PROBS):
    """Per-token losses [sample][token], written out with python floats."""
    low, high = 1 - args.eps_clip, 1 + (args.eps_clip if args.eps_clip_high is None else args.eps_clip_high)
    out, clips = [], []
    for mask, lp, lo, advantage in zip(MASKS, log_probs, old, ADVANTAGES, strict=True):
        mean = sum(m * (a - b) for m, a, b in zip(mask, lp, lo, strict=True)) / max(sum(mask), 1)
        losses, clipped = [], []
        for t in range(len(mask)):
            log_ratio = mean if args.advantage_estimator == "gspo" else lp[t] - lo[t]
            ratio = math.exp(min(max(log_ratio, -20), 20))
            weight = min(max(ratio, low), high)
            a = advantage[t]
            if args.advantage_estimator == "cispo":
                losses.append(-weight * a * lp[t])
                clipped.append(float(weight != ratio))
                continue
            plain, cut = -ratio * a, -weight * a
            loss = max(plain, cut)
            if args.eps_clip_c is not None and a < 0:
                loss = min(-args.eps_clip_c * a, loss)
            losses.append(loss)
            clipped.append(float(cut > plain))
        out.append(losses)
        clips.append(clipped)
    return out, clips


def slow_reduce(args, per_token, masks=MASKS, sums=SUMS):
    if args.calculate_per_token_loss:
        return sum(x * m for xs, ms in zip(per_token, masks, strict=True) for x, m in zip(xs, ms, strict=True)) / 5
    total = 0.0
    for xs, ms, d in zip(per_token, masks, sums, strict=True):
        total += sum(x * m for x, m in zip(xs, ms, strict=True)) / max(d, 1)
    return total / 2
