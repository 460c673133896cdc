"""Values that follow from others."""

from __future__ import annotations

import pytest

from miles.arguments import make_args
from miles.arguments.resolve import FULLY_ASYNC_FUNCTION, ROLLOUT_FUNCTION


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr("miles.arguments.resolve.has_gpu", lambda: True)
    monkeypatch.setattr("miles.arguments.resolve.has_package", lambda name: True)


@pytest.fixture
def cpu(monkeypatch):
    monkeypatch.setattr("miles.arguments.resolve.has_gpu", lambda: False)


def derive(**fields):
    return make_args(check=False, **fields)


def test_a_cpu_host(cpu):
    args = derive()
    assert (args.train_device, args.train_backend, args.rollout_engine) == ("cpu", "fsdp", "embedded")
    assert (args.attn_implementation, args.bf16) == ("sdpa", False)


def test_a_gpu_host_takes_what_is_built(gpu):
    args = derive()
    assert (args.train_device, args.train_backend, args.rollout_engine) == ("cuda", "megatron", "sglang")
    assert args.bf16
    args = derive(train_backend="fsdp")
    assert (args.attn_implementation, args.bf16) == ("flash_attention_2", True)


def test_a_gpu_host_without_megatron_core_trains_with_fsdp(gpu, monkeypatch):
    monkeypatch.setattr("miles.arguments.resolve.has_package", lambda name: name != "megatron.core")
    assert derive().train_backend == "fsdp"


def test_a_gpu_host_once_everything_is_built(gpu, monkeypatch):
    args = derive(colocate=True)
    assert (args.train_backend, args.rollout_engine) == ("megatron", "sglang")
    assert args.offload_train and args.offload_rollout
    assert (args.lr_decay_style, args.weight_decay, args.adam_beta2) == ("linear", 0.01, 0.999)
    assert derive(colocate=True, offload_train=False).offload_train is False


def test_weights_travel_as_handles_where_each_engine_is_on_a_trainers_gpu(gpu):
    def mode(**fields):
        return derive(**{"train_backend": "fsdp"} | fields).update_weight_transfer_mode

    assert mode(colocate=True) == mode(colocate=True, actor_num_nodes=2) == "ipc"
    assert mode(colocate=True, update_weight_transfer_mode="broadcast") == mode() == "broadcast"
    assert mode(colocate=True, rollout_num_gpus_per_engine=2) == "broadcast"
    assert mode(colocate=True, train_device="cpu") == "broadcast"
    assert mode(colocate=True, train_backend="megatron") == "broadcast", "its ranks hold parts of the model"
    assert mode(colocate=True, train_backend="megatron", actor_num_gpus_per_node=1) == "ipc"


def test_sglang_serves_the_type_that_the_trainer_computes_in(gpu, tmp_path):
    def served(config, **fields):
        (tmp_path / "config.json").write_text(config)
        return derive(hf_checkpoint=str(tmp_path), **fields).sglang_dtype

    assert served('{"dtype": "float32"}') == served("{}") == "bfloat16"
    assert served('{"dtype": "bfloat16"}') is None
    assert served('{"torch_dtype": "float16"}') is None
    assert served('{"dtype": "bfloat16"}', train_device="cpu") == "float32"
    assert served('{"dtype": "float32"}', sglang_dtype="float16") == "float16"


def test_what_is_given_is_never_replaced(gpu):
    args = derive(train_device="cpu", train_backend="fsdp", weight_decay=0.5, adam_beta2=0.5, fp16=True)
    assert (args.train_device, args.weight_decay, args.adam_beta2, args.bf16) == ("cpu", 0.5, 0.5, False)


@pytest.mark.parametrize(
    ("given", "size", "steps"),
    [
        ({}, 8, 1),
        ({"num_steps_per_rollout": 2}, 4, 2),
        ({"global_batch_size": 2}, 2, 4),
    ],
)
def test_batch_sizes(given, size, steps):
    args = derive(rollout_batch_size=4, n_samples_per_prompt=2, **given)
    assert (args.global_batch_size, args.num_steps_per_rollout) == (size, steps)
    assert args.over_sampling_batch_size == 4


def test_lengths():
    args = derive(rollout_max_context_len=100, rollout_max_response_len=50)
    assert (args.rollout_max_prompt_len, args.eval_max_prompt_len) == (99, 99)
    assert (args.eval_max_response_len, args.eval_max_context_len) == (50, 100)


def test_evaluation_takes_the_rollouts_settings_unless_it_has_its_own():
    args = derive(rollout_temperature=0.5, eval_top_p=0.5, label_key="answer", reward_key="score")
    assert (args.eval_temperature, args.eval_top_p, args.eval_top_k) == (0.5, 0.5, -1)
    assert (args.eval_label_key, args.eval_reward_key) == ("answer", "score")


def test_a_dataset_without_a_name_is_called_aime():
    assert derive(eval_prompt_data=["x.jsonl"]).eval_prompt_data == ["aime", "x.jsonl"]


def test_colocated_engines_take_the_trainers_devices():
    args = derive(colocate=True, actor_num_nodes=2, actor_num_gpus_per_node=4)
    assert args.rollout_num_gpus == 8


def test_recorded_rollouts_start_no_engines():
    assert derive(load_debug_rollout_data="x/{rollout_id}.pt").debug_train_only


def test_dump_details_turns_on_what_is_dumped(tmp_path):
    args = derive(dump_details=str(tmp_path), save_debug_rollout_data="mine/{rollout_id}.pt")
    assert args.save_debug_rollout_data == "mine/{rollout_id}.pt"
    assert args.save_debug_train_data == f"{tmp_path}/train_data/{{rollout_id}}_{{rank}}.pt"


def test_ci_runs_check_weights_unless_told_not_to():
    assert derive(ci_test=True).check_weight_update_equal
    assert not derive(ci_test=True, ci_disable_weight_update_checker=True).check_weight_update_equal
    assert not derive(ci_test=True, debug_rollout_only=True).check_weight_update_equal


def test_the_rollout_function():
    assert derive().rollout_function_path == ROLLOUT_FUNCTION
    args = derive(fully_async=True)
    assert (args.rollout_function_path, args.rollout_submission_granularity) == (FULLY_ASYNC_FUNCTION, "sample")
    assert derive(rollout_function_path="a.b").eval_function_path == "a.b"


def test_the_reference_model_is_the_first_policy():
    assert derive(hf_checkpoint="/m", use_kl_loss=True).ref_load == "/m"
    assert derive(hf_checkpoint="/m").ref_load is None


def test_names_of_runs():
    assert derive(run_name="x").run_dir.endswith("/runs/x")
    assert derive(run_dir="/somewhere/y").run_name == "y"
    assert derive(hf_checkpoint="/models/Qwen3-4B").run_name.startswith("Qwen3-4B-")


def test_each_derived_value_has_a_reason():
    args = derive(rollout_batch_size=4)
    assert args.derived["global_batch_size"] == "the rollout's samples over the steps"
    assert "rollout_batch_size" not in args.derived
