"""How far trainer and engine are apart on one response, for masked importance sampling."""

from __future__ import annotations

import torch
from torch import Tensor

from miles.backends.training_utils.loss_hub.policy_loss import ratio_of


def sequence_metrics(train: Tensor, rollout: Tensor, trains: Tensor) -> dict[str, Tensor]:
    """Perplexities, KL estimates and chi-squared of a response, `[response]` each; 0 at masked tokens.

    p, q: log-probs of trainer and engine. KL is of engine to trainer, as tokens come from the engine: `kl` q - p,
    `k3_kl` e^(p-q) - 1 - (p-q). chi2 is E[m^2] - 1, of the token's ratio and of the response's. What belongs to the whole
    response is repeated over its tokens.
    """
    p, q = torch.where(trains, train, 0.0), torch.where(trains, rollout, 0.0)
    d, count = p - q, trains.sum().clamp(min=1)
    train_ppl, rollout_ppl = -p.sum() / count, -q.sum() / count
    whole = {
        "training_log_ppl": train_ppl,
        "training_ppl": ratio_of(train_ppl),
        "rollout_log_ppl": rollout_ppl,
        "rollout_ppl": ratio_of(rollout_ppl),
        "log_ppl_diff": train_ppl - rollout_ppl,
        "log_ppl_abs_diff": (train_ppl - rollout_ppl).abs(),
        "ppl_ratio": ratio_of(train_ppl - rollout_ppl),
        "chi2_seq": ratio_of(2 * d.sum()) - 1,
    }
    token = {"kl": -d, "k3_kl": ratio_of(d) - 1 - d, "chi2_token": ratio_of(d).square() - 1}
    return token | {name: torch.where(trains, value, 0.0) for name, value in whole.items()}
