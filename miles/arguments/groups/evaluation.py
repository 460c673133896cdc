"""Evaluation during training."""

from __future__ import annotations

from miles.arguments.flag import flag, group


@group("Evaluation", owner="eval")
class EvalArgs:
    eval_interval: int | None = flag(None, "Evaluate after this many rollouts, and before the first.", ge=1)
    eval_prompt_data: list[str] | None = flag(
        None, "Datasets as NAME FILE pairs; a single FILE is called aime.", metavar="NAME FILE"
    )
    eval_config: str | None = flag(
        None,
        "YAML or JSON with datasets and their own settings, a path or base64:...; used instead of --eval-prompt-data.",
    )
    eval_function_path: str | None = flag(
        None, "Evaluates: same forms as --rollout-function-path. Unset: that one.", hook="rollout"
    )
    skip_eval_before_train: bool = flag(False, "No evaluation before the first rollout.")
    eval_input_key: str | None = flag(None, "Column of the prompt. Unset: --input-key.")
    eval_label_key: str | None = flag(None, "Column of the answer. Unset: --label-key.")
    eval_tool_key: str | None = flag(None, "Column of the tool specs. Unset: --tool-key.")
    n_samples_per_eval_prompt: int = flag(1, "Responses to each evaluation prompt.", ge=1)
    eval_temperature: float | None = flag(None, "Unset: --rollout-temperature.", ge=0)
    eval_top_p: float | None = flag(None, "Unset: --rollout-top-p.", gt=0, le=1)
    eval_top_k: int | None = flag(None, "Unset: --rollout-top-k.", ge=-1)
    eval_max_response_len: int | None = flag(None, "Unset: --rollout-max-response-len.", ge=1)
    eval_max_prompt_len: int | None = flag(None, "Unset: --rollout-max-prompt-len.", ge=1)
    eval_min_new_tokens: int | None = flag(None, "Shortest response, in tokens.", ge=0)
    eval_max_context_len: int | None = flag(
        None, "Longest prompt plus response. Unset: --rollout-max-context-len.", ge=2
    )


@group("Evaluation on its own engines", system="eval-fleet")
class EvalFleetArgs:
    eval_num_gpus: int = flag(0, "GPUs of engines that only evaluate; 0 evaluates on the rollout engines.", ge=0)
    eval_num_gpus_per_engine: int = flag(1, "GPUs of one of them.", ge=1)
    eval_hf_dir: str | None = flag(None, "Folder that snapshots for evaluation are exported to.", metavar="DIR")
    eval_max_in_flight: int = flag(2, "Evaluations that may run at a time.", ge=1)
    eval_overflow_policy: str = flag(
        "backpressure", "What happens when more would run.", choices=("backpressure", "skip")
    )
    eval_keep_snapshots: int = flag(2, "Snapshots that are kept.", ge=1)
