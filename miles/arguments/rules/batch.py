"""Prompts, samples, optimizer steps: the numbers must multiply out."""

from __future__ import annotations

from miles.arguments.args import Args
from miles.arguments.rules.architecture import read_config
from miles.arguments.rules.rule import Rule


def _trains(a: Args) -> bool:
    return not a.debug_rollout_only


def _sizes_known(a: Args) -> bool:
    return a.rollout_batch_size is not None and a.global_batch_size is not None


def _equation_is_broken(a: Args) -> bool:
    if not _trains(a) or not _sizes_known(a) or a.use_dynamic_global_batch_size:
        return False
    samples, step = a.rollout_batch_size * a.n_samples_per_prompt, a.global_batch_size
    if a.allow_partial_train_step and "num_steps_per_rollout" not in a.given:
        return False
    return samples != step * (a.num_steps_per_rollout or 1)


def _equation(a: Args) -> str:
    samples = a.rollout_batch_size * a.n_samples_per_prompt
    steps, size = a.num_steps_per_rollout, a.global_batch_size
    fits = [d for d in range(1, samples + 1) if samples % d == 0]
    nearest = sorted(fits, key=lambda d: (abs(d - size), -d))[:3]
    return (
        f"--rollout-batch-size {a.rollout_batch_size} x --n-samples-per-prompt {a.n_samples_per_prompt} = {samples} samples, "
        f"but --global-batch-size {size} x {steps} optimizer step{'s' if steps != 1 else ''} (--num-steps-per-rollout) = "
        f"{size * steps}. Both must be equal: set --global-batch-size to a divisor of {samples} "
        f"(near {size}: {', '.join(map(str, sorted(nearest)))}), or leave it out"
    )


def _one_prompt_one_sample(a: Args) -> bool:
    centred = a.advantage_estimator in ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
    own = a.custom_reward_post_process_path or a.custom_convert_samples_to_train_data_path or a.group_rm
    return (
        _trains(a)
        and a.loss_type == "policy_loss"
        and a.compute_advantages_and_returns
        and a.n_samples_per_prompt == 1
        and a.rewards_normalization
        and centred
        and not own
    )


def _positions(a: Args) -> int | None:
    return read_config(a.hf_checkpoint).get("max_position_embeddings")


def _beyond_the_model(a: Args) -> list[str]:
    """Context lengths that are longer than what an engine takes."""
    given = [
        name for name in ("rollout_max_context_len", "eval_max_context_len") if name in a.given and getattr(a, name)
    ]
    positions = _positions(a) if given else None
    return [name for name in given if positions is not None and getattr(a, name) > positions]


RULES = (
    Rule(
        "rollout-batch-size",
        lambda a: a.rollout_batch_size is None,
        "--rollout-batch-size is required: the number of prompts of a rollout",
    ),
    Rule(
        "length-of-the-run",
        lambda a: a.num_rollout is None and a.num_epoch is None,
        "set --num-rollout (or --num-epoch) to say how long the run is",
    ),
    Rule(
        "epochs-need-a-dataset",
        lambda a: a.num_rollout is None and a.num_epoch is not None and not a.rollout_global_dataset,
        "--num-epoch counts passes over --prompt-data, which --disable-rollout-global-dataset turns off: set --num-rollout",
    ),
    Rule("batch-equation", _equation_is_broken, _equation),
    Rule(
        "group-of-one",
        _one_prompt_one_sample,
        "with --n-samples-per-prompt 1, --advantage-estimator {advantage_estimator} compares each reward with itself, so that "
        "every advantage is 0: set --n-samples-per-prompt to 2 or more, or --disable-rewards-normalization",
    ),
    Rule(
        "over-sampling-covers-the-batch",
        lambda a: _sizes_known(a) and a.over_sampling_batch_size < a.rollout_batch_size,
        "--over-sampling-batch-size {over_sampling_batch_size} is below --rollout-batch-size {rollout_batch_size}: raise it, or leave it out",
    ),
    Rule(
        "dynamic-batch-needs-a-size",
        lambda a: a.use_dynamic_batch_size and a.max_tokens_per_gpu is None,
        "--use-dynamic-batch-size fills micro-batches up to --max-tokens-per-gpu: set it",
    ),
    Rule(
        "micro-batch-of-two-kinds",
        lambda a: a.use_dynamic_batch_size and "micro_batch_size" in a.given and a.micro_batch_size != 1,
        "--micro-batch-size {micro_batch_size} has no effect with --use-dynamic-batch-size: drop one of them",
    ),
    Rule(
        "padded-batches-are-static",
        lambda a: a.qkv_format == "bshd" and a.use_dynamic_batch_size,
        "--qkv-format bshd pads sequences to the longest of a micro-batch, which --max-tokens-per-gpu would not count: use thd with "
        "--use-dynamic-batch-size, or set --micro-batch-size",
    ),
    Rule(
        "flops-balance-needs-dynamic-batch",
        lambda a: a.balance_by_flops and not a.use_dynamic_batch_size,
        "--balance-by-flops balances dynamic micro-batches: set --use-dynamic-batch-size and --max-tokens-per-gpu",
    ),
    Rule(
        "dynamic-global-batch-needs-dynamic-batch",
        lambda a: a.use_dynamic_global_batch_size and not a.use_dynamic_batch_size and not a.multi_lora_n_adapters,
        "--use-dynamic-global-batch-size needs --use-dynamic-batch-size",
    ),
    Rule(
        "prompt-fits-the-context",
        lambda a: (
            None not in (a.rollout_max_context_len, a.rollout_max_prompt_len)
            and a.rollout_max_prompt_len > a.rollout_max_context_len - 1
        ),
        "--rollout-max-prompt-len {rollout_max_prompt_len} leaves no room for a response in --rollout-max-context-len "
        "{rollout_max_context_len}: it may be one less at most",
    ),
    Rule(
        "response-fits-the-context",
        lambda a: (
            None not in (a.rollout_max_context_len, a.rollout_max_response_len)
            and a.rollout_max_response_len > a.rollout_max_context_len - 1
        ),
        "--rollout-max-response-len {rollout_max_response_len} leaves no room for a prompt in --rollout-max-context-len "
        "{rollout_max_context_len}: lower the one or raise the other",
    ),
    Rule(
        "context-fits-the-model",
        lambda a: a.rollout_engine == "embedded" and not a.debug_train_only and _beyond_the_model(a),
        lambda a: (
            f"{a.options(_beyond_the_model(a))} is beyond the {_positions(a)} positions of --hf-checkpoint {a.hf_checkpoint} "
            "(max_position_embeddings): lower it, or leave it out"
        ),
    ),
)
