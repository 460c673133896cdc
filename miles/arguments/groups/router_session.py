"""Routing over the engines, and session servers."""

from __future__ import annotations

from miles.arguments.flag import flag, group


@group("Router and engine clients")
class RouterArgs:
    sglang_server_concurrency: int = flag(512, "Requests in flight to one engine.", ge=1)
    sglang_router_ip: str | None = flag(None, "Address of a router that runs already.", system="sglang-router")
    sglang_router_port: int | None = flag(None, "Its port.", ge=1, le=65535, system="sglang-router")
    sglang_router_policy: str | None = flag(None, "How the router picks an engine.", system="sglang-router")
    sglang_router_request_timeout_secs: int = flag(
        14400, "Seconds that the router waits for an engine.", ge=1, system="sglang-router"
    )
    use_miles_router: bool = flag(
        False, "Route through a router process instead of from the rollout manager.", system="miles-router"
    )
    miles_router_timeout: float | None = flag(
        None,
        "Seconds that it waits for an engine's answer. Unset: --rollout-request-timeout.",
        gt=0,
        owner="router",
        system="miles-router",
    )
    miles_router_max_connections: int | None = flag(
        None, "Its connections to one engine. Unset: any number.", ge=1, owner="router", system="miles-router"
    )
    miles_router_health_check_failure_threshold: int = flag(
        3,
        "Failed health checks in a row after which the router sends an engine nothing, until it answers again.",
        ge=1,
        owner="router",
        system="miles-router",
    )
    use_distributed_post: bool = flag(
        False, "Send requests from several processes on several nodes.", system="distributed-post"
    )


@group("Session servers")
class SessionArgs:
    use_session_server: str | None = flag(
        None,
        "Run TITO session servers; v1 keeps one line of history, v2 a tree.",
        nargs="?",
        choices=("v1", "v2"),
        metavar="v1|v2",
    )
    session_server_ip: str | None = flag(
        None, "Address that they bind. Unset: that of the rollout manager's node.", owner="sessions"
    )
    session_server_port: list[int] | None = flag(
        None,
        "One port, or a first and an end (not used): one server for each. Unset: one server on any free port.",
        ge=1,
        le=65535,
        metavar="PORT",
        owner="sessions",
    )
    tito_model: str = flag("default", "Model family, for the seams between messages.")
    session_message_matcher: str = flag(
        "strict",
        "How a replayed message is recognised: strict, loose_tool_call, role_content_only, or an import path.",
        owner="sessions",
    )
    session_sample_picker_path: str = flag(
        "miles.rollout.session.v2.picker_hub.drop_retries",
        "(leaf_samples, session_metadata) -> samples to train.",
        owner="tree-sessions",
        hook="session_samples",
    )
    session_sample_postprocessor_path: str = flag(
        "miles.rollout.session.v2.postprocessor_hub.default_postprocess",
        "(leaf_samples, session_metadata) -> the same samples, applied last.",
        owner="tree-sessions",
        hook="session_samples",
    )
    session_strict_history: bool = flag(
        False,
        "Refuse requests that take back a generation (v1) or begin another conversation (v2), instead of counting them.",
        owner="sessions",
    )
    session_idle_timeout: float = flag(
        7200.0, "Seconds after which a session that nobody uses is dropped.", gt=0, owner="sessions"
    )
    session_max_count: int = flag(65536, "Most sessions of one server.", ge=1, owner="sessions")
    session_max_bytes: int = flag(8 << 30, "Most bytes of history that one server holds.", ge=1, owner="sessions")
