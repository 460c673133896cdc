"""What a session server is told when it starts: the part of the run's arguments that concerns it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

from miles.rollout.prompts import chat_template_kwargs, model_context_length


@dataclass(frozen=True)
class SessionConfig:
    """Serialisable, so that a server process can be started with it.

    Attributes:
        key: of the run: creates sessions, says which engines there are.
        engine_key: that engines want with a generation; None where they want none.
        idle_timeout_s: a session that nobody speaks to for so long is dropped.
        max_bytes: of all histories of a server; max_body_bytes of one request.
        log_dir: folder of the write-ahead log; None keeps sessions in memory only.
    """

    hf_checkpoint: str
    version: str = "v1"
    tito_model: str = "default"
    matcher: str = "strict"
    picker: str = "miles.rollout.session.v2.picker_hub.drop_retries"
    postprocessor: str = "miles.rollout.session.v2.postprocessor_hub.default_postprocess"
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    chat_template_path: str | None = None
    trust_remote_code: bool = False
    context_length: int | None = None
    strict_history: bool = False
    record_messages: bool = False
    routed_experts: bool = False
    key: str = field(default_factory=lambda: secrets.token_hex(16))
    engine_key: str | None = None
    instance_id: str = field(default_factory=lambda: secrets.token_hex(16))
    idle_timeout_s: float = 7200.0
    max_sessions: int = 65536
    max_bytes: int = 8 << 30
    max_body_bytes: int = 64 << 20
    request_timeout_s: float = 600.0
    recovery_timeout_s: float = 600.0
    log_dir: str | None = None

    @classmethod
    def from_args(cls, args: Any, **overrides: Any) -> SessionConfig:
        return cls(
            **{
                "hf_checkpoint": str(args.hf_checkpoint),
                "version": args.use_session_server,
                "tito_model": args.tito_model,
                "matcher": args.session_message_matcher,
                "picker": args.session_sample_picker_path,
                "postprocessor": args.session_sample_postprocessor_path,
                "template_kwargs": chat_template_kwargs(args),
                "chat_template_path": args.chat_template_path,
                "trust_remote_code": bool(args.trust_remote_code),
                "context_length": model_context_length(args),
                "strict_history": args.session_strict_history,
                "record_messages": args.save_debug_trajectory_data is not None,
                "routed_experts": args.use_rollout_routing_replay,
                "engine_key": args.sglang_api_key,
                "idle_timeout_s": args.session_idle_timeout,
                "max_sessions": args.session_max_count,
                "max_bytes": args.session_max_bytes,
                "request_timeout_s": args.rollout_request_timeout,
                "recovery_timeout_s": args.engine_start_timeout + args.weight_update_timeout,
            }
            | overrides
        )
