"""Losses of whole steps, from the model's distributions to one number, beside the same in plain Python."""

import pytest
import torch

from tests.fast.training_utils import slow_objective
from tests.fast.training_utils.toy import ToyModel, make_args, make_columns, num_rollouts, run_step

ICEPOP = "miles.backends.training_utils.loss_hub.corrections.icepop_function"
WHITE = dict(normalize_advantages=True)
CONFIGS = {
    "grpo": {},
    "grpo_per_token": dict(calculate_per_token_loss=True),
    "grpo_whitened": WHITE,
    "grpo_asymmetric": dict(eps_clip=0.1, eps_clip_high=0.6),
    "grpo_dual_clip": dict(eps_clip_c=1.3),
    "grpo_tis": dict(use_tis=True, tis_clip=1.1, tis_clip_low=0.7),
    "grpo_clip_or_pop": dict(use_tis=True, tis_clip=1.3, tis_clip_low=0.6, custom_tis_function_path=ICEPOP),
    "grpo_rollout_logprobs": dict(use_rollout_logprobs=True),
    "grpo_opsm": dict(use_opsm=True, opsm_delta=0.05),
    "grpo_kl_k1": dict(use_kl_loss=True, kl_loss_coef=0.3),
    "grpo_kl_k2_unbiased": dict(use_kl_loss=True, kl_loss_coef=0.3, kl_loss_type="k2", use_unbiased_kl=True),
    "grpo_kl_k3_entropy": dict(use_kl_loss=True, kl_loss_coef=0.3, kl_loss_type="k3", entropy_coef=0.05),
    "grpo_kl_low_var": dict(use_kl_loss=True, kl_loss_coef=0.3, kl_loss_type="low_var_kl", use_unbiased_kl=True),
    "gspo": dict(advantage_estimator="gspo", eps_clip=0.05),
    "gspo_opsm_tis": dict(advantage_estimator="gspo", use_opsm=True, opsm_delta=0.05, use_tis=True, tis_clip=1.2),
    "cispo": dict(advantage_estimator="cispo", eps_clip=1.0, eps_clip_high=0.5),
    "reinforce_plus_plus": dict(advantage_estimator="reinforce_plus_plus", gamma=0.9, kl_coef=0.2, **WHITE),
    "reinforce_plus_plus_baseline": dict(advantage_estimator="reinforce_plus_plus_baseline", kl_coef=0.2, **WHITE),
    "ppo": dict(advantage_estimator="ppo", gamma=0.95, lambd=0.9, **WHITE),
    "value": dict(advantage_estimator="ppo", gamma=0.95, lambd=0.9, loss_type="value_loss"),
    "sft": dict(loss_type="sft_loss"),
}


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_loss_of_a_step_equals_loops_over_its_tokens(name, layout):
    columns = make_columns(9, reference=True)
    batch = dict(global_batch_size=num_rollouts(columns), micro_batch_size=2)
    args = make_args(**CONFIGS[name], **batch)
    _, metrics = run_step(args, columns, dp=2, layout=layout)
    want = slow_objective.step_loss(args, columns, distributions(columns))
    assert metrics["train/loss"] == pytest.approx(want, rel=1e-4, abs=1e-6)
    assert abs(want) > 1e-3


@torch.no_grad()
def distributions(columns):
    """Log-softmax rows before each response token, under the toy model."""
    model = ToyModel()
    rows = []
    for tokens, response in zip(columns["tokens"], columns["response_lengths"], strict=True):
        log_p = torch.log_softmax((model.sequence(torch.tensor(tokens)) @ model.head.T).double(), -1)
        rows.append(log_p[len(tokens) - response - 1 : len(tokens) - 1].tolist())
    return rows


def test_the_comparison_sees_a_wrong_clip_a_wrong_mask_and_a_wrong_denominator():
    """The loops are no tautology: each of these moves the loss by far more than the tolerance."""
    columns = make_columns(9, reference=True)
    args = make_args(global_batch_size=num_rollouts(columns), micro_batch_size=2)
    loss = run_step(args, columns)[1]["train/loss"]
    rows = distributions(columns)
    unmasked = {**columns, "loss_masks": [[1] * len(m) for m in columns["loss_masks"]]}
    apart = {**columns, "rollout_ids": list(range(9))}
    for wrong in (
        slow_objective.step_loss(make_args(eps_clip=0.1), columns, rows),
        slow_objective.step_loss(args, unmasked, rows),
        slow_objective.step_loss(args, apart, rows),
    ):
        assert abs(wrong - loss) > 1e-3 * abs(loss)
