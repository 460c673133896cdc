"""Weights & Biases, online or offline."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import string
import threading
from typing import Any

from miles.tracking.sinks.base import Sink, SinkError
from miles.tracking.steps import EVAL, ROLLOUT, TRAIN, compute_rollout_step

logger = logging.getLogger(__name__)
_FINISH_TIMEOUT_S = 60.0
_INIT_TIMEOUT_S = 60.0
_SECRET = ("key", "token", "password", "secret")


class WandbSink(Sink):
    """Every metric is drawn over its own axis, so an evaluation that arrives late still lands on its step."""

    name = "wandb"

    def __init__(self, args: Any) -> None:
        self.args = args
        self.run: Any = None

    def open(self, state: dict[str, Any], resumed_at: int | None) -> None:
        args = self.args
        try:
            import wandb
        except ImportError:
            raise SinkError("--use-wandb needs the package wandb: pip install 'miles[tracking]'") from None
        mode: Any = getattr(args, "wandb_mode", None) or os.environ.get("WANDB_MODE") or "online"
        try:
            if mode == "online" and getattr(args, "wandb_key", None):
                wandb.login(key=args.wandb_key, host=getattr(args, "wandb_host", None), verify=True)
            settings: Any = {"init_timeout": _INIT_TIMEOUT_S, "console": "off", "silent": True}
            if getattr(args, "wandb_host", None):
                settings["base_url"] = args.wandb_host
            self.run = wandb.init(
                **self._identity(state), mode=mode, config=public_config(args), settings=wandb.Settings(**settings)
            )
        except Exception as error:
            raise SinkError(
                f"--use-wandb: Weights & Biases did not start: {type(error).__name__}: {error}. Without a network set "
                "--wandb-mode offline; a key goes into WANDB_API_KEY"
            ) from error
        for axis in (ROLLOUT, TRAIN, EVAL):
            self.run.define_metric(axis, hidden=True)
        self.run.define_metric("*", step_metric=ROLLOUT)
        self.run.define_metric("train/*", step_metric=TRAIN)
        self.run.define_metric("eval/*", step_metric=EVAL)

    def _identity(self, state: dict[str, Any]) -> dict[str, Any]:
        args = self.args
        run_id = getattr(args, "wandb_run_id", None) or state.get("run_id")
        group = getattr(args, "wandb_group", None)
        name = getattr(args, "wandb_run_name", None) or group or args.run_name
        if getattr(args, "wandb_random_suffix", True) and not run_id:
            suffix = "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(8))
            name = f"{name}_{suffix}"
            group = f"{group}_{suffix}" if group else None
        directory = getattr(args, "wandb_dir", None) or args.run_dir
        os.makedirs(directory, exist_ok=True)
        identity = {
            "project": getattr(args, "wandb_project", None) or "miles",
            "entity": getattr(args, "wandb_team", None),
            "group": group or state.get("group"),
            "name": state.get("name") if run_id and state.get("name") else name,
            "dir": directory,
        }
        if run_id:
            identity |= {"id": run_id, "resume": "allow"}
        return {key: value for key, value in identity.items() if value is not None}

    def log(self, metrics: dict[str, Any], step_key: str, step: int, time_s: float) -> None:
        if step_key == ROLLOUT:
            step = compute_rollout_step(self.args, step)
        # No `step=`: wandb's own counter goes on, and a row whose axis lies in the past is kept.
        self.run.log({**metrics, step_key: step})

    def state_dict(self) -> dict[str, Any]:
        if self.run is None:
            return {}
        return {"run_id": self.run.id, "name": self.run.name, "group": self.run.group or None}

    def close(self) -> None:
        if self.run is None:
            return
        run, self.run = self.run, None
        # Waits for the upload, for ever without a network: bounded here; what is not sent lies in the folder.
        finishing = threading.Thread(target=_finish, args=(run,), name="wandb-finish", daemon=True)
        finishing.start()
        finishing.join(_FINISH_TIMEOUT_S)
        if finishing.is_alive():
            raise TimeoutError(
                f"the upload did not end within {_FINISH_TIMEOUT_S:g} s; the rest is in {run.dir}: send it with `wandb sync`"
            )


def _finish(run: Any) -> None:
    with contextlib.suppress(Exception):
        run.finish()


def public_config(args: Any) -> dict[str, Any]:
    """The flags as plain values, without anything that looks like a secret."""
    values = args.to_dict() if hasattr(args, "to_dict") else dict(vars(args))
    plain = (bool, int, float, str, list, dict, type(None))
    return {
        name: value if isinstance(value, plain) else str(value)
        for name, value in values.items()
        if not name.startswith("_") and not name.endswith(_SECRET)
    }
