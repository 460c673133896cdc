"""Taking over a server that runs already: that it serves this run's model, that nothing of another run hangs on it."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from miles.backends.engine_api.capabilities import probe
from miles.backends.engine_api.client import EngineClient
from miles.backends.engine_api.errors import EngineRejected, EngineStartError

UNKNOWN_VERSION = "default"  # what a server calls weights that nobody named


async def adopt(client: EngineClient, model_path: str, *, resume: bool) -> int:
    """Returns the ranks of the server that join a weight group. With `resume` it generates afterwards if it was paused.

    Raises: EngineStartError for a server of another model, or one that lacks what a run needs; engine errors as they come.
    """
    await probe(client)
    served, info = await client.model_info(), await client.server_info()
    if problem := other_model(served, model_path):
        raise EngineStartError(f"the external engine at {client.base_url} {problem}")
    # An update that was given up, of this run or of one before, may have left its session open.
    with contextlib.suppress(EngineRejected):
        await client.end_weight_update()
    # Versions count this run's updates; what it served before is none of them.
    await client.update_weight_version(UNKNOWN_VERSION)
    if resume:
        await client.continue_()
    return int(info.get("tp_size") or 1)


def other_model(served: dict[str, Any], model_path: str) -> str | None:
    """What shows that a server serves another model than the one in `model_path`; None where nothing does.

    Weights are not looked at: the first update replaces them. By architecture, where both say it, else by folder name.
    """
    ours = _read(Path(model_path) / "config.json")
    for key in ("architectures", "model_type"):
        if served.get(key) and ours.get(key) and served[key] != ours[key]:
            return f"serves {key} {served[key]}, and --hf-checkpoint {model_path} has {ours[key]}"
    theirs = _read(Path(str(served.get("model_path"))) / "config.json")  # where it is on a disk that is seen here too
    shape = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    differing = [key for key in shape if theirs and ours and theirs.get(key) != ours.get(key)]
    if differing:
        said = ", ".join(f"{key} {theirs.get(key)} instead of {ours.get(key)}" for key in differing)
        return f"serves {served['model_path']}, which has {said} in --hf-checkpoint {model_path}"
    return None


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
