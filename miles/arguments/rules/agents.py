"""Sessions, agents, multi-turn generation, engine topology."""

from __future__ import annotations

from miles.arguments.args import Args
from miles.arguments.rules.conflict import Clash, excludes, requires
from miles.arguments.rules.rule import Rule, about
from miles.backends.engine_api.topology import DECODE, PREFILL, TopologyError, plan_engines

MULTI_TURN = "miles.rollout.generate_hub.multi_turn.generate"
AGENTIC = "miles.rollout.generate_hub.agentic_tool_call.generate"


def _sessions(a: Args) -> bool:
    return a.use_session_server is not None


def _split_in_yaml(a: Args) -> bool:
    """Whether the model that is trained, which sessions speak with, is served by halves of engines."""
    if a.sglang_config is None:
        return False
    try:
        return any(spec.trained and spec.kind in (PREFILL, DECODE) for spec in plan_engines(a))
    except TopologyError:
        return False  # another rule reports it


def _bad_port_range(a: Args) -> bool:
    ports = a.session_server_port or []
    return len(ports) > 2 or (len(ports) == 2 and ports[0] >= ports[1])


SESSIONS = about(
    "sessions",
    excludes(
        "tree-sessions-alone",
        "--use-session-server v2",
        lambda a: a.use_session_server == "v2",
        Clash("--group-rm", lambda a: a.group_rm),
        Clash("--partial-rollout", lambda a: a.partial_rollout),
        Clash("--recompute-logprobs-via-prefill", lambda a: a.recompute_logprobs_via_prefill),
    ),
    excludes(
        "sessions-survive-updates",
        "--use-session-server",
        _sessions,
        Clash("--pause-generation-mode abort", lambda a: a.pause_generation_mode == "abort"),
    ),
    excludes(
        "sessions-need-whole-engines",
        "--use-session-server",
        _sessions,
        Clash("--prefill-num-servers", lambda a: a.prefill_num_servers is not None),
        Clash("prefill and decode groups in --sglang-config", _split_in_yaml),
    ),
    Rule(
        "session-ports",
        _bad_port_range,
        "--session-server-port takes one port, or a first one and an end above it",
    ),
    excludes(
        "family-brings-its-template",
        "--tito-model",
        lambda a: a.tito_model != "default",
        Clash("--chat-template-path", lambda a: a.chat_template_path is not None),
    ),
    requires(
        "family-needs-sessions",
        "--tito-model",
        lambda a: a.tito_model != "default",
        Clash("--use-session-server", _sessions),
    ),
    requires(
        "agentic-needs-an-agent",
        f"--custom-generate-function-path {AGENTIC}",
        lambda a: a.custom_generate_function_path == AGENTIC,
        Clash("--custom-agent-function-path", lambda a: a.custom_agent_function_path),
        Clash("--use-session-server", _sessions),
    ),
    excludes(
        "agents-take-messages",
        f"--custom-generate-function-path {AGENTIC}",
        lambda a: a.custom_generate_function_path == AGENTIC,
        Clash("--apply-chat-template", lambda a: a.apply_chat_template),
    ),
)

MULTI_TURN_RULES = about(
    "multi-turn",
    requires(
        "multi-turn-needs-tools",
        f"--custom-generate-function-path {MULTI_TURN}",
        lambda a: a.custom_generate_function_path == MULTI_TURN,
        Clash("--generate-execute-tool-function-path", lambda a: a.generate_execute_tool_function_path),
        Clash("--generate-tool-specs-path", lambda a: a.generate_tool_specs_path),
        Clash("--generate-tool-call-parser", lambda a: a.generate_tool_call_parser),
    ),
)

TOPOLOGY = about(
    "engine-topology",
    excludes(
        "external-engines-alone",
        "--rollout-external",
        lambda a: a.rollout_external,
        Clash("--prefill-num-servers", lambda a: a.prefill_num_servers is not None),
        Clash("--sglang-config", lambda a: a.sglang_config is not None),
        Clash("--colocate", lambda a: a.colocate),
    ),
    requires(
        "external-engines-have-addresses",
        "--rollout-external",
        lambda a: a.rollout_external,
        Clash("--rollout-external-engine-addrs", lambda a: a.rollout_external_engine_addrs),
    ),
    requires(
        "addresses-are-of-external-engines",
        "--rollout-external-engine-addrs",
        lambda a: a.rollout_external_engine_addrs,
        Clash("--rollout-external", lambda a: a.rollout_external),
    ),
    excludes(
        "one-topology",
        "--sglang-config",
        lambda a: a.sglang_config is not None,
        Clash("--prefill-num-servers", lambda a: a.prefill_num_servers is not None),
    ),
)

SGLANG = about(
    "sglang",
    requires(
        "dp-engines-share-attention",
        "--sglang-dp-size above 1",
        lambda a: (a.sglang_dp_size or 1) > 1,
        Clash("--sglang-enable-dp-attention", lambda a: a.sglang_enable_dp_attention),
    ),
)

TRUE_ON_POLICY = about(
    "true-on-policy",
    requires(
        "prefill-scores-are-exact",
        "--recompute-logprobs-via-prefill",
        lambda a: a.recompute_logprobs_via_prefill,
        Clash("--true-on-policy-mode", lambda a: a.true_on_policy_mode),
    ),
    excludes(
        "true-on-policy-precision",
        "--true-on-policy-mode",
        lambda a: a.true_on_policy_mode,
        Clash("--fp16", lambda a: a.fp16),
        Clash("--no-keep-fp32-master", lambda a: not a.keep_fp32_master),
    ),
)

RULES = (*SESSIONS, *MULTI_TURN_RULES, *TOPOLOGY, *SGLANG, *TRUE_ON_POLICY)
