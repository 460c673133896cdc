"""What a started server can do, asked of the server itself: versions differ in endpoints, and forks in versions."""

from __future__ import annotations

from dataclasses import dataclass

from miles.backends.engine_api.client import EngineClient
from miles.backends.engine_api.errors import EngineStartError

# Without these no run is possible, whatever its flags.
_NEEDED = (
    "/generate",
    "/abort_request",
    "/pause_generation",
    "/continue_generation",
    "/flush_cache",
    "/init_weights_update_group",
    "/destroy_weights_update_group",
    "/update_weights_from_distributed",
    "/update_weight_version",
    "/weights_checker",
)
_MEMORY = ("/release_memory_occupation", "/resume_memory_occupation")
_SESSION = ("/begin_weight_update", "/end_weight_update")


@dataclass(frozen=True)
class Capabilities:
    """`server`: "embedded" or "sglang". `update_sessions`: updates happen between a begin and an end.

    `digests`: what its checksums digest. "tensor": each tensor as it was sent, with its dtype and shape
    (`miles.utils.digest`). "served", on a GPU "served-gpu": the tensors that it keeps, some of them joined
    (`miles.weight_update.served_digests`). `memory_release`: whether it gives memory back when told to.
    `dp_ranks`: schedulers that share its requests, each with a prefix cache of its own.
    """

    server: str
    version: str
    update_sessions: bool
    digests: str
    memory_release: bool = True
    dp_ranks: int = 1


async def probe(client: EngineClient) -> Capabilities:
    """Raises: EngineStartError that names every endpoint that a run needs and the server lacks."""
    info = await client.server_info()
    version = str(info.get("version", "of unknown version"))
    if info.get("engine") == "embedded":
        return Capabilities("embedded", version, update_sessions=True, digests="tensor")
    paths = await client.endpoints()
    if lacking := [path for path in _NEEDED if path not in paths]:
        raise EngineStartError(
            f"the server at {client.base_url} (SGLang {version}) lacks {', '.join(lacking)}, which a run needs: "
            "install another release"
        )
    return Capabilities(
        "sglang",
        version,
        update_sessions=all(p in paths for p in _SESSION),
        digests="served" if info.get("device") == "cpu" else "served-gpu",
        memory_release=bool(info.get("enable_memory_saver")) and all(p in paths for p in _MEMORY),
        dp_ranks=int(info.get("dp_size") or 1),
    )
