"""Every startup rule, broken once; and what must not break one."""

from __future__ import annotations

import pytest

from miles.arguments import ArgumentsError, make_args
from miles.arguments.resolve import TRACKER
from miles.arguments.rules import RULES, Rule

SFT = {"loss_type": "sft_loss", "compute_advantages_and_returns": False}

# rule -> flags that break it, and a part of what must be said.
BROKEN = {
    "rollout-batch-size": ({"rollout_batch_size": None}, "--rollout-batch-size is required"),
    "length-of-the-run": ({"num_rollout": None}, "set --num-rollout"),
    "epochs-need-a-dataset": (
        {"num_rollout": None, "num_epoch": 1, "rollout_global_dataset": False},
        "--num-epoch counts passes over --prompt-data",
    ),
    "batch-equation": (
        {"global_batch_size": 3, "num_steps_per_rollout": 2},
        "--rollout-batch-size 4 x --n-samples-per-prompt 2 = 8 samples, but --global-batch-size 3 x 2 optimizer steps",
    ),
    "group-of-one": ({"n_samples_per_prompt": 1}, "every advantage is 0"),
    "over-sampling-covers-the-batch": ({"over_sampling_batch_size": 3}, "is below --rollout-batch-size 4"),
    "dynamic-batch-needs-a-size": ({"use_dynamic_batch_size": True}, "--max-tokens-per-gpu: set it"),
    "micro-batch-of-two-kinds": (
        {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 9, "micro_batch_size": 2},
        "--micro-batch-size 2 has no effect",
    ),
    "padded-batches-are-static": (
        {"qkv_format": "bshd", "use_dynamic_batch_size": True, "max_tokens_per_gpu": 9},
        "--qkv-format bshd pads sequences",
    ),
    "flops-balance-needs-dynamic-batch": ({"balance_by_flops": True}, "set --use-dynamic-batch-size"),
    "dynamic-global-batch-needs-dynamic-batch": (
        {"use_dynamic_global_batch_size": True},
        "needs --use-dynamic-batch-size",
    ),
    "prompt-fits-the-context": (
        {"rollout_max_context_len": 8, "rollout_max_prompt_len": 8},
        "--rollout-max-prompt-len 8 leaves no room",
    ),
    "response-fits-the-context": (
        {"rollout_max_context_len": 8, "rollout_max_response_len": 8},
        "--rollout-max-response-len 8 leaves no room",
    ),
    "context-fits-the-model": (
        {"rollout_max_context_len": 4096, "rollout_engine": "embedded"},
        "--rollout-max-context-len 4096 is beyond the 2048 positions of --hf-checkpoint",
    ),
    "one-half-of-a-run": (
        {"debug_rollout_only": True, "debug_train_only": True},
        "--debug-rollout-only starts no trainer",
    ),
    "train-only-needs-data": ({"debug_train_only": True}, "miles.rollout.sft_rollout.generate_rollout"),
    "train-only-cannot-evaluate": (
        {"load_debug_rollout_data": "x/{rollout_id}.pt", "eval_interval": 1},
        "--eval-interval needs engines",
    ),
    "zero-rollouts-evaluate": ({"num_rollout": 0}, "--num-rollout 0 only evaluates"),
    "sync-driver-updates-every-rollout": (
        {"driver": "train.py", "update_weights_interval": 2},
        "--update-weights-interval 2 is read by train_async.py only",
    ),
    "async-driver-has-own-devices": ({"driver": "train_async.py", "colocate": True}, "--colocate cannot work"),
    "fault-components": ({"use_fault_tolerance": True, "ft_components": []}, "watches nothing"),
    "rollout-devices": ({"rollout_num_gpus": None}, "set --rollout-num-gpus"),
    "colocated-size": (
        {"colocate": True, "rollout_num_gpus": 1},
        "the trainer's 2 devices, so --rollout-num-gpus 1 has no effect",
    ),
    "offload-takes-turns": (
        {"driver": "train_async.py", "offload_rollout": True},
        "drop --offload-train and --offload-rollout",
    ),
    "released-weights-come-back": (
        {"offload_rollout": True, "debug_skip_weight_update": True},
        "set --offload-rollout-level kv_cache",
    ),
    "part-of-a-gpu": ({"gpus_per_rank": 0.5}, "--gpus-per-rank 0.5 is for one trainer rank and one engine"),
    "engines-divide": (
        {"rollout_num_gpus": 3, "rollout_num_gpus_per_engine": 2},
        "--rollout-num-gpus 3 is not a multiple of --rollout-num-gpus-per-engine 2",
    ),
    "embedded-engine-size": (
        {"rollout_num_gpus": 2, "rollout_num_gpus_per_engine": 2},
        "set --rollout-num-gpus-per-engine 1",
    ),
    "deterministic-gpus": ({"train_device": "cuda", "deterministic_mode": True}, "--deterministic-mode on GPUs"),
    "gpu-is-there": ({"train_device": "cuda"}, "torch sees no GPU on this host"),
    "sentinel-needs-a-save": ({"save_trigger_sentinel": "x"}, "set --save"),
    "eval-group-rewards": ({"eval_interval": 1, "group_rm": True}, "--group-rm scores groups"),
    "one-eval-source": (
        {"eval_interval": 1, "eval_config": "e.yaml", "eval_prompt_data": ["a", "b"]},
        "--eval-config replaces --eval-prompt-data",
    ),
    "eval-needs-data": ({"eval_interval": 1}, "set --eval-prompt-data or --eval-config"),
    "one-kl": ({"kl_coef": 0.1, "kl_loss_coef": 0.1, "use_kl_loss": True}, "exclude each other"),
    "reward-kl-needs-token-rewards": ({"kl_coef": 0.1}, "--kl-coef 0.1 has no effect on --advantage-estimator grpo"),
    "dual-clip-above-one": ({"eps_clip_c": 1.0}, "--eps-clip-c 1.0 must be above 1"),
    "reinforce-needs-whitening": ({"advantage_estimator": "reinforce_plus_plus"}, "set --normalize-advantages"),
    "policy-loss-needs-advantages": ({"compute_advantages_and_returns": False}, "policy_loss needs advantages"),
    "sft-without-advantages": ({"loss_type": "sft_loss"}, "set --disable-compute-advantages-and-returns too"),
    "custom-loss-needs-a-function": ({"loss_type": "custom_loss"}, "needs --custom-loss-function-path"),
    "one-correction": ({"use_tis": True, "use_rollout_logprobs": True}, "drop one of them"),
    "mismatch-metrics-need-a-function": ({"get_mismatch_metrics": True}, "runs --custom-tis-function-path"),
    "tis-interval": ({"use_tis": True, "tis_clip": 0.5, "tis_clip_low": 0.75}, "--tis-clip-low 0.75 is above"),
    "old-actor-or-rollout-logprobs": ({"keep_old_actor": True, "use_rollout_logprobs": True}, "drop one of them"),
    "async-ppo-is-corrected": ({"driver": "train_async.py", "advantage_estimator": "ppo"}, "set --use-tis"),
    "whole-distribution": ({"rollout_top_p": 0.9}, "cut the distribution that is sampled from"),
    "training-needs-randomness": ({"rollout_temperature": 0}, "there is nothing to learn"),
    "one-half-precision": ({"bf16": True, "fp16": True}, "--bf16 and --fp16 exclude each other"),
    "flash-attention-needs-a-gpu": ({"attn_implementation": "flash_attention_2"}, "runs on GPUs only"),
    "replicas-divide-the-ranks": (
        {"dp_replicate_size": 3},
        "--dp-replicate-size 3 does not divide the 2 trainer ranks",
    ),
    "one-warmup": ({"lr_warmup_fraction": 0.1, "lr_warmup_iters": 3}, "give one of them"),
    "floor-below-peak": ({"lr": 0.5, "min_lr": 1.0}, "--min-lr 1.0 is above --lr 0.5"),
    "wsd-needs-a-length": ({"lr_decay_style": "WSD"}, "needs --lr-wsd-decay-iters"),
    "wandb": ({"use_wandb": True}, "pip install 'miles[tracking]'"),
    "tensorboard": ({"use_tensorboard": True}, "pip install 'miles[tracking]'"),
    "check-needs-updates": (
        {"check_weight_update_equal": True, "debug_skip_weight_update": True},
        "--check-weight-update-equal compares engines with the trainer after an update",
    ),
    "ipc-own-device": ({"update_weight_transfer_mode": "ipc"}, "it needs --colocate"),
    "sglang-pipeline-updates": (
        {"rollout_engine": "sglang", "rollout_num_gpus": 2, "rollout_num_gpus_per_engine": 2, "sglang_pp_size": 2},
        "--sglang-pp-size above 1",
    ),
    "sglang-verified-ranks": (
        {"rollout_engine": "sglang", "rollout_num_gpus": 2, "rollout_num_gpus_per_engine": 2},
        "or --no-verify-weight-update",
    ),
    "save-over-another-run": ({"save": "SAVED"}, "holds checkpoints of another run"),
}


@pytest.fixture
def saved(tmp_path):
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / TRACKER).write_text("3")
    return folder


@pytest.fixture(autouse=True)
def _bare_host(monkeypatch):
    """No GPU, and none of the optional packages."""
    monkeypatch.setattr("miles.arguments.rules.training.has_package", lambda name: False)
    monkeypatch.setattr("miles.arguments.rules.running.has_gpu", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_the_common_arguments_break_no_rule(problems):
    assert problems() == []


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_says_what_to_set(name, problems, saved):
    changes, said = BROKEN[name]
    changes = {k: str(saved) if v == "SAVED" else v for k, v in changes.items()}
    found = problems(**changes)
    assert any(said in problem for problem in found), found


def test_every_rule_has_a_case():
    assert {rule.name for rule in RULES if isinstance(rule, Rule) and rule.system is None} == set(BROKEN)


def test_rule_names_are_unique():
    names = [rule.name for rule in RULES]
    assert len(names) == len(set(names))


def test_a_rule_alone_is_broken_by_its_own_case(fields, saved):
    """The condition of the rule holds, rather than some other rule's message matching."""
    for rule in RULES:
        if rule.name not in BROKEN or rule.name == "save-over-another-run":
            continue
        changes, said = BROKEN[rule.name]
        given = {k: v for k, v in (fields | changes).items() if v is not None}
        found = rule.problems(make_args(check=False, **given))
        assert found and said in found[0], rule.name


# ---- the engines' sizes ------------------------------------------------------------------------------------------------

FOUR = {"rollout_engine": "sglang", "rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 4}
FINE = {"verify_weight_update": False, "debug_rollout_only": True}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"sglang_tp_size": 2},
            "an engine of 4 devices (--rollout-num-gpus-per-engine) cannot have --sglang-tp-size 2",
        ),
        ({"sglang_tp_size": 4, "sglang_pp_size": 2}, "--sglang-tp-size 4, --sglang-pp-size 2, which need 8"),
        ({"sglang_dp_size": 3, "sglang_enable_dp_attention": True}, "--sglang-dp-size 3 does not divide"),
        ({"sglang_ep_size": 3}, "--sglang-ep-size 3 does not divide the engine's tensor-parallel size 4"),
        (
            {"sglang_pp_size": 2, "sglang_ep_size": 4},
            "--sglang-ep-size 4 does not divide the engine's tensor-parallel size 2",
        ),
        ({"sglang_dp_size": 2}, "needs --sglang-enable-dp-attention"),
        ({"num_gpus_per_node": 3}, "does not fill whole nodes of --num-gpus-per-node 3"),
        ({"prefill_num_servers": 1}, "needs prefill and decode engines"),
        ({"sglang_admin_api_key": "k"}, "--sglang-admin-api-key is set for each engine by the run"),
    ],
)
def test_engines_that_cannot_be_are_refused(changes, said, problems):
    found = problems(**(FOUR | FINE | changes))
    assert any(said in problem for problem in found), found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sglang_tp_size": 4, "sglang_ep_size": 4},
        {"sglang_pp_size": 2, "sglang_tp_size": 2},
        {"sglang_dp_size": 4, "sglang_enable_dp_attention": True},
        {"num_gpus_per_node": 2},
        {"sglang_speculative_algorithm": "EAGLE", "sglang_speculative_num_steps": 3},
    ],
)
def test_engines_of_every_parallel_kind_are_taken(changes, problems):
    found = [p for p in problems(**(FOUR | FINE | changes)) if "has no SGLang" not in p]
    assert found == []


def test_what_is_wrong_with_a_topology_comes_with_the_rest(problems, tmp_path):
    config = tmp_path / "topology.yaml"
    config.write_text("sglang: [{server_groups: [{num_gpus: 3, worker_type: chef}]}]")
    found = problems(rollout_engine="sglang", sglang_config=str(config), rollout_temperature=0)
    assert any("worker_type chef" in p for p in found) and any("nothing to learn" in p for p in found)


def test_running_engines_need_no_sglang_here_and_take_their_keys(problems):
    external = {"rollout_external": True, "rollout_external_engine_addrs": ["h:1", "h:2"], "rollout_num_gpus": None}
    assert problems(rollout_engine="sglang", sglang_admin_api_key="k", **external) == []


# ---- what is fine ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"global_batch_size": 4},
        {"global_batch_size": 4, "num_steps_per_rollout": 2},
        {"num_steps_per_rollout": 4},
        {"n_samples_per_prompt": 1, "rewards_normalization": False},
        {"n_samples_per_prompt": 1, **SFT},
        {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 64, "use_dynamic_global_batch_size": True},
        {"kl_coef": 0.1, "advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True},
        {"use_kl_loss": True, "kl_loss_type": "low_var_kl"},
        {"kl_loss_type": "low_var_kl"},
        {"debug_rollout_only": True, "rollout_top_p": 0.5, "rollout_temperature": 0},
        {"driver": "train_async.py", "update_weights_interval": 2},
        {"colocate": True, "rollout_num_gpus": None},
        {"colocate": True, "rollout_num_gpus": 2},
        {"load_debug_rollout_data": "x/{rollout_id}.pt", "rollout_num_gpus": None, "prompt_data": None},
        {"save_hf": "/tmp/x/{rollout_id:04d}", "save_interval": 2},
        {"advantage_estimator": "gspo"},
        {"advantage_estimator": "cispo", "eps_clip": 1.0, "eps_clip_high": 4.0},
    ],
)
def test_what_breaks_no_rule(changes, problems):
    assert problems(**changes) == []


def test_a_partial_last_step_is_allowed_when_asked_for(problems):
    assert problems(global_batch_size=3) != []
    assert problems(global_batch_size=3, allow_partial_train_step=True) == []


def test_the_equation_offers_divisors_near_the_given_size(problems):
    (problem,) = problems(global_batch_size=3)
    assert "a divisor of 8 (near 3: 1, 2, 4)" in problem


def test_all_problems_come_in_one_error(make):
    with pytest.raises(ArgumentsError) as error:
        make(global_batch_size=3, rollout_top_p=0.5, eps_clip_c=0.5)
    assert len(error.value.problems) == 3


def test_rules_can_be_left_out(fields):
    assert make_args(check=False, **(fields | {"global_batch_size": 3})).global_batch_size == 3
