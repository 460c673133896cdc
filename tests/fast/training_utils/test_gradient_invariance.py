"""Gradients and logged values are the same, to rounding, however a batch is split."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fast.training_utils.toy import ToyModel, make_args, make_columns, num_rollouts, run_step

MIS = "miles.backends.training_utils.loss_hub.mis.compute_mis_weights_with_cp"
VARIANTS = {
    "grpo": {},
    "per_token": dict(calculate_per_token_loss=True),
    "gspo": dict(advantage_estimator="gspo", eps_clip=0.3),
    "cispo": dict(advantage_estimator="cispo"),
    "reinforce_plus_plus": dict(advantage_estimator="reinforce_plus_plus", normalize_advantages=True, kl_coef=0.1),
    "reinforce_plus_plus_baseline": dict(
        advantage_estimator="reinforce_plus_plus_baseline", normalize_advantages=True, kl_coef=0.1
    ),
    "ppo": dict(advantage_estimator="ppo", gamma=0.9, lambd=0.9, normalize_advantages=True),
    "value": dict(advantage_estimator="ppo", loss_type="value_loss"),
    "kl_and_entropy": dict(
        use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3", entropy_coef=0.01, use_unbiased_kl=True
    ),
    "tis": dict(use_tis=True, tis_clip=1.2),
    "icepop": dict(
        use_tis=True,
        tis_clip=1.5,
        tis_clip_low=0.5,
        custom_tis_function_path="miles.backends.training_utils.loss_hub.corrections.icepop_function",
    ),
    "mis_normalised": dict(use_tis=True, tis_batch_normalize=True, custom_tis_function_path=MIS),
    "mis_sequences": dict(
        use_tis=True,
        tis_level="sequence",
        tis_mode="mask",
        tis_upper_bound=3.0,
        tis_batch_normalize=True,
        use_rs=True,
        rs_level="geometric",
        rs_veto_threshold=0.3,
        custom_tis_function_path=MIS,
    ),
    "opsm": dict(use_opsm=True),
    "rollout_logprobs": dict(use_rollout_logprobs=True),
    "temperature": dict(rollout_temperature=0.6),
    "sft": dict(loss_type="sft_loss"),
}
SPLITS = {
    "12x1": dict(batch=dict(micro_batch_size=1)),
    "3x4": dict(batch=dict(micro_batch_size=4)),
    "two_ranks": dict(batch=dict(micro_batch_size=3), dp=2),
    "five_ranks_with_fillers": dict(batch=dict(micro_batch_size=1), dp=5),
    "dynamic": dict(batch=dict(use_dynamic_batch_size=True, max_tokens_per_gpu=20), dp=2),
    "dynamic_balanced": dict(batch=dict(use_dynamic_batch_size=True, max_tokens_per_gpu=30, balance_data=True), dp=3),
    "padded_rows": dict(batch=dict(micro_batch_size=4), layout="padded"),
    "packed_with_padding": dict(batch=dict(micro_batch_size=4), pad_multiple=16),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_and_metrics_do_not_depend_on_the_split(variant):
    columns = make_columns(reference=True)
    batch = dict(global_batch_size=num_rollouts(columns))
    whole, whole_metrics = run_step(make_args(**VARIANTS[variant], **batch, micro_batch_size=12), columns)
    assert max(g.abs().max() for g in whole) > 1e-4
    for name, split in SPLITS.items():
        split = dict(split)
        args = make_args(**VARIANTS[variant], **{**batch, **split.pop("batch")})
        grads, metrics = run_step(args, columns, **split)
        for a, b in zip(whole, grads, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
        assert metrics.keys() == whole_metrics.keys()
        assert metrics == pytest.approx(whole_metrics, rel=1e-4, abs=1e-6), name


@settings(max_examples=20, deadline=None)
@given(
    count=st.integers(1, 9),
    seed=st.integers(0, 1000),
    dp=st.integers(1, 4),
    cap=st.integers(8, 60),
    siblings=st.booleans(),
    per_token=st.booleans(),
    estimator=st.sampled_from(["grpo", "gspo", "cispo"]),
)
def test_any_batch_under_any_split(count, seed, dp, cap, siblings, per_token, estimator):
    columns = make_columns(count, siblings=siblings, seed=seed)
    base = dict(
        global_batch_size=num_rollouts(columns),
        calculate_per_token_loss=per_token,
        advantage_estimator=estimator,
        use_tis=True,
    )
    whole, whole_metrics = run_step(make_args(**base, micro_batch_size=count), columns)
    split = make_args(**base, use_dynamic_batch_size=True, max_tokens_per_gpu=cap, balance_data=True)
    grads, metrics = run_step(split, columns, dp=dp, pad_multiple=4)
    for a, b in zip(whole, grads, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)
    assert metrics == pytest.approx(whole_metrics, rel=1e-4, abs=1e-5)


def test_the_default_loss_is_a_mean_over_rollouts_of_token_means():
    """Written out: sum over rollouts of (sum over the rollout's trained tokens / how many there are) / rollouts."""
    columns = make_columns(6)
    args = make_args(global_batch_size=num_rollouts(columns), loss_type="sft_loss")
    _, metrics = run_step(args, columns)
    model, by_rollout = ToyModel().requires_grad_(False), {}
    for tokens, response, mask, rollout in zip(
        columns["tokens"], columns["response_lengths"], columns["loss_masks"], columns["rollout_ids"], strict=True
    ):
        log_p = torch.log_softmax(model.sequence(torch.tensor(tokens)) @ model.head.T, -1)
        for t in range(response):
            position = len(tokens) - response + t
            if mask[t]:
                by_rollout.setdefault(rollout, []).append(-float(log_p[position - 1, tokens[position]]))
    expected = sum(sum(v) / len(v) for v in by_rollout.values()) / len(by_rollout)
    assert metrics["train/loss"] == pytest.approx(expected, rel=1e-5)


def test_per_token_mode_divides_by_the_trained_tokens_of_the_whole_step():
    columns = make_columns(6)
    args = make_args(global_batch_size=num_rollouts(columns), loss_type="sft_loss", calculate_per_token_loss=True)
    _, metrics = run_step(args, columns, dp=2)
    model, terms = ToyModel().requires_grad_(False), []
    for tokens, response, mask in zip(
        columns["tokens"], columns["response_lengths"], columns["loss_masks"], strict=True
    ):
        log_p = torch.log_softmax(model.sequence(torch.tensor(tokens)) @ model.head.T, -1)
        start = len(tokens) - response
        terms += [-float(log_p[start + t - 1, tokens[start + t]]) for t in range(response) if mask[t]]
    assert metrics["train/loss"] == pytest.approx(sum(terms) / len(terms), rel=1e-5)


def test_siblings_of_one_execution_count_once():
    """Splitting a rollout into two samples with the same tokens in all leaves the loss as it is."""
    columns = make_columns(4, siblings=False)
    doubled = {name: [*column, column[0]] for name, column in columns.items()}
    doubled["rollout_mask_sums"] = [2 * s if i in (0, 4) else s for i, s in enumerate(doubled["rollout_mask_sums"])]
    one, _ = run_step(make_args(), columns)
    two, _ = run_step(make_args(), doubled)
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-7)


def test_sft_ignores_the_rollout_temperature():
    columns = make_columns(4, siblings=False)
    _, plain = run_step(make_args(loss_type="sft_loss"), columns)
    _, tempered = run_step(make_args(loss_type="sft_loss", rollout_temperature=0.7), columns)
    assert plain["train/loss"] == tempered["train/loss"]
