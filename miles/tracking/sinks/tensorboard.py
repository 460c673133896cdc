"""TensorBoard event files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from miles.tracking.sinks.base import Sink, SinkError
from miles.tracking.steps import ROLLOUT, compute_rollout_step, train_steps_per_rollout


class TensorboardSink(Sink):
    name = "tensorboard"

    def __init__(self, args: Any) -> None:
        self.args = args
        self.writer: Any = None

    @property
    def folder(self) -> Path:
        """`--tensorboard-dir` (default: `tensorboard` below the run folder), then project and experiment if named."""
        args = self.args
        root = Path(getattr(args, "tensorboard_dir", None) or Path(args.run_dir) / "tensorboard")
        project, experiment = getattr(args, "tb_project_name", None), getattr(args, "tb_experiment_name", None)
        if project or experiment:
            root = root / (project or "miles") / (experiment or args.run_name)
        return root

    def open(self, state: dict[str, Any], resumed_at: int | None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise SinkError("--use-tensorboard needs the package tensorboard: pip install 'miles[tracking]'") from None
        # Hides what an earlier process wrote past the checkpoint. TensorBoard has one step number for all tags, so
        # this only fits where both axes count alike.
        purge = resumed_at if train_steps_per_rollout(self.args) == 1 else None
        try:
            self.writer = SummaryWriter(str(self.folder), purge_step=purge)
        except OSError as error:
            raise SinkError(f"--use-tensorboard: cannot write {self.folder}: {error}") from error

    def log(self, metrics: dict[str, Any], step_key: str, step: int, time_s: float) -> None:
        if step_key == ROLLOUT:
            step = compute_rollout_step(self.args, step)
        for name, value in metrics.items():
            if isinstance(value, bool | int | float):
                self.writer.add_scalar(name, float(value), step, walltime=time_s)
            elif isinstance(value, str):
                self.writer.add_text(name, value, step, walltime=time_s)
        self.writer.flush()

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None
