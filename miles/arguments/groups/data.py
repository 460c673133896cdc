"""Prompts, and how samples become batches and optimizer steps."""

from __future__ import annotations

from miles.arguments.flag import flag, group


@group("Prompt data")
class DataArgs:
    prompt_data: str | None = flag(
        None, "Prompts: .jsonl, .json or .parquet; path@[a:b] takes a slice, commas separate several.", metavar="FILE"
    )
    data_source_path: str | None = flag(None, "Class (args) that hands out prompts.", hook="data_source")
    rollout_global_dataset: bool = flag(
        True,
        "Prompts come from the data source's own logic instead of --prompt-data.",
        off="--disable-rollout-global-dataset",
    )
    input_key: str = flag("input", "Column of the prompt: text or a list of messages.")
    label_key: str | None = flag(None, "Column of the reference answer.")
    metadata_key: str = flag("metadata", "Column of the metadata object that rewards and tools see.")
    tool_key: str = flag("tools", "Column of the tool specs.")
    multimodal_keys: dict | None = flag(
        None, "Columns of images, audio, video, as JSON.", metavar="JSON", system="multimodal"
    )
    apply_chat_template: bool = flag(False, "Render prompts with the tokenizer's chat template.")
    apply_chat_template_kwargs: dict = flag(
        {}, "Extra arguments of the chat template, as JSON.", metavar="JSON", owner="chat-template"
    )
    chat_template_path: str | None = flag(
        None, "Jinja file to use instead of the tokenizer's chat template.", metavar="FILE", path="file"
    )
    loss_mask_type: str = flag(
        "qwen", "Which tokens of a conversation SFT trains.", choices=("qwen", "qwen3", "distill_qwen"), owner="sft"
    )


@group("Batches")
class BatchArgs:
    num_rollout: int | None = flag(None, "Rollouts to make. 0 evaluates and ends.", ge=0)
    num_epoch: int | None = flag(None, "Passes over the prompts; used when --num-rollout is not given.", ge=1)
    rollout_batch_size: int | None = flag(None, "Prompts of one rollout. Required.", ge=1)
    n_samples_per_prompt: int = flag(1, "Responses to each prompt: the size of a group.", ge=1)
    global_batch_size: int | None = flag(
        None, "Samples of one optimizer step, over all ranks. Unset: one step a rollout.", ge=1
    )
    num_steps_per_rollout: int | None = flag(
        None, "Optimizer steps on each rollout; decides --global-batch-size.", ge=1
    )
    micro_batch_size: int = flag(1, "Samples that go through the model together.", ge=1)
    use_dynamic_batch_size: bool = flag(False, "Fill micro-batches up to --max-tokens-per-gpu tokens instead.")
    max_tokens_per_gpu: int | None = flag(
        None, "Most tokens of one micro-batch on one rank.", ge=1, owner="dynamic-batch", lenient=True
    )
    log_probs_max_tokens_per_gpu: int | None = flag(
        None, "Nothing.", ge=1, dead="scoring passes take the micro-batches of training"
    )
    balance_data: bool = flag(False, "Give every rank about the same number of tokens.")
    balance_by_flops: bool = flag(False, "Balance by estimated FLOPs instead of tokens.")
    allow_partial_train_step: bool = flag(False, "Train a last step with fewer samples instead of dropping them.")
    use_dynamic_global_batch_size: bool = flag(False, "Let the number of samples that arrived decide the step size.")
    rollout_trim_samples: bool = flag(
        True,
        "Nothing.",
        off="--disable-rollout-trim-samples",
        dead="samples are never trimmed: a batch that does not fill whole steps is an error unless --allow-partial-train-step",
    )
    data_pad_size_multiplier: int = flag(
        128, "Packed rows are padded to a multiple of this.", ge=1, owner="megatron", lenient=True
    )
    padded_vocab_size: int | None = flag(
        None, "Vocabulary size after padding.", ge=1, owner="megatron", system="megatron"
    )
    object_store_backend: str = flag(
        "ray",
        "What carries rollout data to the trainer.",
        choices=("ray", "mooncake"),
        later={"mooncake": "mooncake-store"},
    )
    mooncake_store_init_kwargs: dict | None = flag(
        None, "Arguments of the Mooncake store, as JSON.", metavar="JSON", system="mooncake-store"
    )
    mooncake_replica_num: int = flag(1, "Copies that the Mooncake store keeps.", ge=1, system="mooncake-store")
