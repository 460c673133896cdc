"""How trajectories are made: rollout function, sampling, prompts kept or dropped, engines' clients."""

from __future__ import annotations

from miles.arguments.flag import flag, group


@group("Rollout")
class RolloutArgs:
    rollout_engine: str | None = flag(
        None,
        "Engine: sglang, embedded, or an import path. Unset: sglang where it and a GPU are, otherwise embedded.",
        metavar="sglang|embedded|IMPORT.PATH",
    )
    sglang_python: str | None = flag(
        None,
        "Interpreter that has SGLang, where that has an environment of its own. Unset: the one that runs this.",
        path="file",
        owner="sglang",
    )
    rollout_function_path: str | None = flag(
        None,
        "Makes a batch: class (RolloutFnConstructorInput), or fn (args, rollout_id, data_source, evaluation).",
        hook="rollout",
    )
    custom_generate_function_path: str | None = flag(
        None, "Makes one sample: async (GenerateFnInput) or (args, sample, sampling_params).", hook="generate"
    )
    rollout_temperature: float = flag(1.0, "Sampling temperature; 0 is greedy.", ge=0)
    rollout_top_p: float = flag(1.0, "Nucleus sampling; 1 samples from the whole distribution.", gt=0, le=1)
    rollout_top_k: int = flag(-1, "Sample among the k likeliest tokens; -1 means all.", ge=-1)
    rollout_max_context_len: int | None = flag(None, "Longest prompt plus response, in tokens.", ge=2)
    rollout_max_prompt_len: int | None = flag(
        None, "Longer prompts are dropped when the data is read. Unset: --rollout-max-context-len minus 1.", ge=1
    )
    rollout_max_response_len: int | None = flag(None, "Longest response, in tokens.", ge=1)
    rollout_skip_special_tokens: bool = flag(False, "Leave special tokens out of response texts (never out of tokens).")
    rollout_stop: list[str] | None = flag(None, "Texts that end a response.")
    rollout_stop_token_ids: list[int] | None = flag(None, "Token ids that end a response.", ge=0)
    rollout_shuffle: bool = flag(False, "Shuffle prompts, anew for every epoch, from --rollout-seed.")
    rollout_seed: int = flag(42, "Seed of the prompt order and of every sample's random stream.")
    over_sampling_batch_size: int | None = flag(
        None,
        "Groups asked for at a time; more than --rollout-batch-size leaves room for filters. Unset: equal to it.",
        ge=1,
    )
    dynamic_sampling_filter_path: str | None = flag(
        None, "Keeps or drops a group: (args, group) -> DynamicFilterOutput or bool.", hook="dynamic_filter"
    )
    rollout_submission_granularity: str | None = flag(
        None,
        "Unit in which work is handed to engines. Unset: group (sample when fully asynchronous).",
        choices=("group", "sample"),
        later={"sample": "fully-async"},
    )
    partial_rollout: bool = flag(
        False,
        "Keep what an aborted sample has generated and continue it in the next rollout.",
        owner="over-sampling",
    )
    mask_offpolicy_in_partial_rollout: bool = flag(
        False, "Do not train the tokens that earlier weights generated.", owner="partial-rollout"
    )
    custom_rollout_log_function_path: str | None = flag(
        None,
        "(rollout_id, args, samples, rollout_extra_metrics, rollout_time) -> True to skip the built-in rollout metrics.",
        hook="rollout_log",
    )
    custom_eval_rollout_log_function_path: str | None = flag(
        None, "(rollout_id, args, data, extra_metrics) -> True to skip the built-in eval metrics.", hook="eval_log"
    )
    buffer_filter_path: str | None = flag(
        None, "Takes groups out of the buffer: (args, rollout_id, buffer, num_samples) -> groups.", hook="buffer_filter"
    )
    rollout_sample_filter_path: str | None = flag(
        None, "Marks samples to leave out of the loss: (args, groups), sets sample.remove_sample.", hook="sample_filter"
    )
    rollout_all_samples_process_path: str | None = flag(
        None,
        "Sees every finished group of a rollout, filtered ones too: (args, all_samples, get_samples).",
        hook="all_samples",
    )
    rollout_data_postprocess_path: str | None = flag(
        None,
        "Called on trainer ranks with (args, rollout_id, rollout_data) before the first step.",
        hook="data_postprocess",
    )
    keep_old_actor: bool = flag(False, "Keep the weights that made the rollout, and score old log-probs with them.")
    rollout_request_timeout: float = flag(600.0, "Seconds that one generation request may take.", gt=0)
    engine_start_timeout: float = flag(600.0, "Seconds that an engine may take to start.", gt=0)
    max_sample_retries: int = flag(2, "Times a sample is generated again after its request failed.", ge=0)
    max_failed_group_ratio: float = flag(
        0.5, "Stop the run when more than this share of a rollout's groups failed.", ge=0, le=1
    )


@group("Rollout, engine topology", system="engine-topology")
class EngineTopologyArgs:
    rollout_external: bool = flag(
        False, "Use engines that are already running; the run updates them and never ends them."
    )
    rollout_external_engine_addrs: list[str] | None = flag(
        None, "Their addresses, HOST:PORT each.", metavar="HOST:PORT"
    )
    prefill_num_servers: int | None = flag(
        None, "Servers that only prefill, for prefill/decode disaggregation.", ge=1, owner="sglang"
    )
    sglang_config: str | None = flag(
        None, "YAML with models, groups of engines and their overrides.", metavar="FILE", path="file", owner="sglang"
    )


@group("Embedded engine", owner="embedded")
class EmbeddedEngineArgs:
    embedded_max_running_requests: int = flag(64, "Requests that one embedded engine decodes together.", ge=1)
    embedded_num_threads: int = flag(1, "CPU threads of one embedded engine.", ge=1)
    embedded_max_total_tokens: int | None = flag(None, "Tokens that the KV cache holds. Unset: from free memory.", ge=1)
    embedded_dtype: str = flag(
        "auto",
        "Type of the engine's weights; auto takes the model's on a GPU and float32 on a CPU.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )


@group("Multi-turn and agents", system="multi-turn")
class MultiTurnArgs:
    generate_max_turns: int = flag(16, "Most turns of one multi-turn sample.", ge=1)
    generate_tool_specs_path: str | None = flag(None, "Import path of a list of OpenAI tool specs.")
    generate_tool_call_parser: str | None = flag(None, "Name of the parser that finds tool calls in a response.")
    generate_execute_tool_function_path: str | None = flag(
        None, "Runs a tool: (name, params) -> str.", hook="execute_tool"
    )
    custom_agent_function_path: str | None = flag(
        None, "Runs an agent: (base_url, prompt, request_kwargs, metadata).", hook="agent", system="sessions"
    )
    agent_timeout: float | None = flag(
        3600.0,
        "Seconds that one run of an agent may take; then its sample failed.",
        gt=0,
        system="sessions",
        owner="agent",
    )
    max_seq_len: int | None = flag(
        None, "Longest trajectory of an agent, in tokens.", ge=1, system="sessions", owner="agent"
    )
