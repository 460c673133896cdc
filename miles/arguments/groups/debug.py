"""Debugging: half runs, recorded data, dumps, in-run checks."""

from __future__ import annotations

from miles.arguments.flag import flag, group


@group("Debugging")
class DebugArgs:
    dry_run: bool = flag(False, "Print the resolved plan and end.")
    debug_rollout_only: bool = flag(False, "Start no trainer: engines serve --hf-checkpoint as it is.")
    debug_train_only: bool = flag(
        False, "Start no engines: data comes from files or from a rollout function without engines."
    )
    debug_exit_after_rollout: int | None = flag(None, "End after this many rollouts of this process.", ge=1)
    save_debug_rollout_data: str | None = flag(
        None, "Save every rollout's samples; a template with {rollout_id}.", metavar="TEMPLATE"
    )
    load_debug_rollout_data: str | None = flag(
        None, "Train on saved rollouts instead of generating (implies --debug-train-only).", metavar="TEMPLATE"
    )
    load_debug_rollout_data_subsample: float | None = flag(
        None, "Share of the loaded samples to use.", gt=0, le=1, owner="load-debug-data"
    )
    save_debug_trajectory_data: str | None = flag(
        None, "Write readable trajectories (JSONL); a template with {rollout_id}.", metavar="TEMPLATE"
    )
    save_debug_train_data: str | None = flag(
        None, "Save every rank's training tensors; a template with {rollout_id} and {rank}.", metavar="TEMPLATE"
    )
    dump_details: str | None = flag(
        None, "Folder for rollout data, training data and trajectories; sets the flags above.", metavar="DIR"
    )


@group("Checks inside a run")
class CiArgs:
    ci_test: bool = flag(False, "Turn on the checks that CI runs make, weight equality among them.")
    ci_disable_kl_checker: bool = flag(False, "Nothing.", dead="no run checks this; the metrics show it")
    ci_disable_logprobs_checker: bool = flag(False, "Nothing.", dead="no run checks this; the metrics show it")
    ci_disable_weight_update_checker: bool = flag(False, "Without: --check-weight-update-equal.", owner="ci-test")
    ci_metric_checker_key: str | None = flag(None, "Metric that must reach a value.", system="recorded-checks")
    ci_metric_checker_threshold: float | None = flag(None, "The value.", system="recorded-checks")
    ci_save_grad_norm: str | None = flag(
        None, "Write gradient norms; a template.", metavar="TEMPLATE", system="recorded-checks"
    )
    ci_load_grad_norm: str | None = flag(
        None, "Compare gradient norms with these.", metavar="TEMPLATE", system="recorded-checks"
    )
    ci_save_model_hash: str | None = flag(
        None, "Write digests of the weights.", metavar="FILE", system="recorded-checks"
    )
    ci_check_model_hash: str | None = flag(
        None, "Compare digests of the weights with these.", metavar="FILE", system="recorded-checks"
    )
    ci_inject_rollout_data_path: str | None = flag(
        None,
        "Replace generated data by this while engines live; a template.",
        metavar="TEMPLATE",
        system="recorded-checks",
    )
    ci_inject_rollout_data_start_rollout_id: int | None = flag(
        None, "From this rollout on.", ge=0, system="recorded-checks", aliases=("--ci-inject-start-rollout-id",)
    )
    ci_inject_rollout_data_min_match_ratio: float = flag(
        0.9,
        "Share of prompts that must agree.",
        ge=0,
        le=1,
        system="recorded-checks",
        aliases=("--ci-inject-min-match-ratio",),
    )


@group("Profiles and memory", system="profiling")
class ProfileArgs:
    memory_snapshot_dir: str = flag(".", "Folder of memory snapshots.", metavar="DIR")
    memory_snapshot_num_steps: int | None = flag(None, "Steps to record.", ge=1)
    memory_snapshot_path: str | None = flag(None, "File of a memory snapshot.", metavar="FILE")
    memory_recorder: str = flag("torch", "What records.", choices=("torch", "memray"))
    record_memory_history: bool = flag(False, "Record allocations.")
    profile_target: list[str] = flag(["train_overall"], "Parts of a step to profile.")
    use_pytorch_profiler: bool = flag(False, "Profile with torch.profiler.")
    profile_step_start: int = flag(10, "First step of the profile.", ge=0)
    profile_step_end: int = flag(12, "Step at which it ends.", ge=0)


@group("Dumper and audit", system="dumper")
class DumperArgs:
    dumper_enable: bool = flag(False, "Dump tensors of one rollout from engines and trainer.")
    dumper_dir: str = flag("/tmp/dumper", "Folder of the dumps.", metavar="DIR")
    dumper_inference: list[str] | None = flag(None, "Settings for engines.", metavar="KEY=VALUE")
    dumper_fwd_only: list[str] | None = flag(None, "Settings for the scoring pass.", metavar="KEY=VALUE")
    dumper_fwd_bwd: list[str] | None = flag(None, "Settings for the training pass.", metavar="KEY=VALUE")
    dumper_source_patcher_config_inference: str | None = flag(None, "Patches of the engine's source.", metavar="FILE")
    dumper_source_patcher_config_train: str | None = flag(None, "Patches of the trainer's source.", metavar="FILE")
    save_debug_event_data: str | None = flag(None, "Folder of audit events.", metavar="DIR")
    save_local_weight_checksum: bool = flag(False, "Write digests of every rank's weights.")
    enable_event_analyzer: bool = flag(False, "Check audit events as they come.")
    enable_witness: bool = flag(False, "Follow every sample through the run.")
    witness_buffer_size: int = flag(1048576, "Samples that the witness remembers.", ge=1)
    debug_deterministic_collective: bool = flag(False, "Reduce in a fixed order.")
