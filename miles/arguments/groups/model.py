"""The model, and where its weights are read from and written to."""

from __future__ import annotations

from miles.arguments.flag import flag, group


@group("Model and checkpoints")
class ModelArgs:
    hf_checkpoint: str | None = flag(
        None,
        "Hugging Face directory: tokenizer, config, the engines' model, and the trainer's first weights.",
        metavar="DIR",
    )
    model_name: str | None = flag(
        None,
        "Family that selects weight converters. Unset: the config's model class.",
        owner="megatron",
        system="megatron-tuning",
    )
    trust_remote_code: bool = flag(False, "Run Python code that the model directory contains.")
    ref_load: str | None = flag(
        None,
        "Reference model for KL, a Hugging Face directory. Unset: --hf-checkpoint.",
        metavar="DIR",
        owner="reference",
        lenient=True,
    )
    ref_ckpt_step: int | None = flag(
        None,
        "Iteration of --ref-load to read.",
        ge=0,
        owner="megatron",
        system="megatron-tuning",
    )
    load: str | None = flag(
        None,
        "Folder of checkpoints to resume from. May equal --save: the first start then begins afresh.",
        metavar="DIR",
    )
    ckpt_step: int | None = flag(None, "Resume from this iteration instead of the last one.", ge=0, system="megatron")
    save: str | None = flag(None, "Folder that checkpoints are written to.", metavar="DIR")
    save_interval: int | None = flag(
        None, "Save after this many rollouts; the last one is saved too.", ge=1, owner="save-any"
    )
    save_retain_interval: int | None = flag(
        None,
        "Of older checkpoints keep only those whose iteration is a multiple of this.",
        ge=1,
        owner="save",
        system="megatron-tuning",
    )
    async_save: bool = flag(False, "Write checkpoints in the background.", system="async-save", owner="save")
    no_save_optim: bool = flag(False, "Leave optimizer state out of checkpoints.", owner="save")
    no_load_optim: bool = flag(False, "Do not read optimizer state when resuming.", owner="load")
    no_load_rng: bool = flag(False, "Do not restore random generators when resuming.", owner="load")
    finetune: bool = flag(
        False,
        "Take weights from --load but start at iteration 0 with a new optimizer.",
        system="megatron",
        owner="load",
    )
    save_hf: str | None = flag(
        None,
        "Also export a Hugging Face directory with each save; {rollout_id} keeps them apart, without it the last one stays.",
        metavar="TEMPLATE",
    )
    save_trigger_sentinel: str | None = flag(
        None,
        "A checkpoint is written after the rollout during which this file appears; it is then removed.",
        metavar="FILE",
    )
    start_rollout_id: int | None = flag(None, "Id of the first rollout. Unset: one after the checkpoint's, or 0.", ge=0)
    keep_published_weights: bool = flag(
        True,
        "Keep a host copy of the last published weights, so that an engine restarted during training can serve at once.",
        negatable=True,
    )
