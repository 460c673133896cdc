"""Flags whose system is not built, whose switch is off, or that nothing reads."""

from __future__ import annotations

import logging

import pytest

from miles.arguments import systems
from miles.arguments.args import ALL_FLAGS, FLAGS
from miles.arguments.owners import OWNERS
from miles.arguments.rules.hooks import HOOKS


def test_an_unbuilt_system_is_named_once_with_all_its_flags(problems):
    found = problems(lora_rank=8, lora_alpha=32, opd_type="sglang", use_opd=True)
    lora, opd = found
    assert "--lora-alpha 32.0, --lora-rank 8 belong to LoRA, which this version does not have yet: drop them" in lora
    assert "--opd-type sglang, --use-opd belong to on-policy distillation" in opd


@pytest.mark.parametrize(
    "changes",
    [{"lora_rank": 0}, {"offload_train": False}, {"tensor_model_parallel_size": 1}, {"expert_tensor_parallel_size": 1}],
)
def test_a_value_that_asks_for_nothing_is_accepted(changes, problems):
    assert problems(**changes) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"update_weight_transfer_mode": "p2p"}, "--update-weight-transfer-mode p2p belongs to the p2p"),
        ({"use_fault_tolerance": True, "ft_components": ["rollout", "train"]}, "--ft-components train belongs to"),
        ({"router_policy": "random"}, "--router-policy random belongs to SGLang's router"),
        ({"optimizer": "muon"}, "--optimizer muon belongs to the Muon optimizer"),
        ({"fp8_format": "e4m3"}, "--fp8-format e4m3 belongs to FP8, FP4 and other number formats"),
        (
            {"offload_train": True, "offload_train_target": "disk"},
            "--offload-train-target disk belongs to offload to disk",
        ),
    ],
)
def test_single_values_of_unbuilt_systems(changes, said, problems):
    assert any(said in p for p in problems(**changes)), problems(**changes)


def test_building_a_system_is_one_line(problems, monkeypatch):
    changes = {"lora_rank": 8, "target_modules": "all-linear"}
    assert problems(**changes) != []
    monkeypatch.setitem(systems.SYSTEMS, "lora", ("LoRA", True))
    assert problems(**changes) == []


def test_a_flag_without_its_switch_is_an_error(problems):
    (problem,) = problems(tis_clip=3.0, tis_clip_low=0.5)
    assert problem == (
        "--tis-clip, --tis-clip-low have no effect without --use-tis or --get-mismatch-metrics: set that, or drop them"
    )
    assert problems(tis_clip=3.0, tis_clip_low=0.5, use_tis=True) == []


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"save_interval": 2}, "--save-interval"),
        ({"wandb_project": "x"}, "--wandb-project"),
        ({"kl_loss_coef": 0.1}, "--kl-loss-coef"),
        ({"n_samples_per_eval_prompt": 2}, "--n-samples-per-eval-prompt"),
        ({"rollout_health_check_interval": 5.0}, "--rollout-health-check-interval"),
        ({"mask_offpolicy_in_partial_rollout": True}, "--mask-offpolicy-in-partial-rollout"),
        ({"partial_rollout": True}, "--partial-rollout"),
        ({"apply_chat_template_kwargs": {"a": 1}}, "--apply-chat-template-kwargs"),
        ({"gamma": 0.5}, "--gamma"),
        ({"opsm_delta": 0.5}, "--opsm-delta"),
    ],
)
def test_settings_of_what_is_switched_off(changes, option, problems):
    assert any(f"{option} has no effect without" in p for p in problems(**changes)), problems(**changes)


def test_a_partial_rollout_needs_groups_that_a_full_batch_cuts_off(problems):
    (problem,) = problems(partial_rollout=True)
    assert problem == (
        "--partial-rollout has no effect without --over-sampling-batch-size above --rollout-batch-size: set that, or drop it"
    )
    assert problems(partial_rollout=True, over_sampling_batch_size=4) == [problem], "4 is --rollout-batch-size"
    assert problems(partial_rollout=True, over_sampling_batch_size=6) == []
    own = {"rollout_function_path": "miles.rollout.sleep_rollout.sleep"}
    assert problems(partial_rollout=True, **own) == [], "another rollout function may cut off what it likes"


def test_what_public_commands_pass_out_of_habit_is_a_warning(problems, caplog):
    with caplog.at_level(logging.WARNING, logger="miles.arguments"):
        assert problems(max_tokens_per_gpu=64, ref_load="/somewhere") == []
    assert "--max-tokens-per-gpu has no effect without --use-dynamic-batch-size" in caplog.text
    assert "--ref-load has no effect without --use-kl-loss" in caplog.text


def test_dead_flags_say_so(problems):
    assert problems(http_proxy="x") == [
        "--http-proxy has no effect (set the http_proxy environment variable instead): drop it"
    ]


def test_declarations_name_things_that_exist():
    for flag in ALL_FLAGS.values():
        assert flag.system is None or flag.system in systems.SYSTEMS, flag.name
        assert flag.owner is None or flag.owner in OWNERS, flag.name
        assert flag.hook is None or flag.hook in HOOKS, flag.name
        assert set(flag.later.values()) <= set(systems.SYSTEMS), flag.name


def test_nothing_is_declared_for_no_flag():
    flags = ALL_FLAGS.values()
    used = {f.system for f in flags} | {system for f in flags for system in f.later.values()}
    assert set(systems.SYSTEMS) <= used
    assert set(OWNERS) <= {f.owner for f in flags}
    assert set(HOOKS) <= {f.hook for f in flags}


def test_every_flag_explains_itself():
    for flag in FLAGS.values():
        assert flag.help.endswith((".", ")")), f"{flag.name}: {flag.help!r}"
