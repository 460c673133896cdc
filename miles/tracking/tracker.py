"""The run's one writer of metrics, in the driver process."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from miles.tracking.sinks.base import Sink
from miles.tracking.sinks.jsonl import JsonlSink
from miles.tracking.sinks.tensorboard import TensorboardSink
from miles.tracking.sinks.wandb_sink import WandbSink
from miles.tracking.steps import STEP_KEYS, compute_rollout_step

logger = logging.getLogger(__name__)

# How often prompts hit the prefix cache depends on when requests meet, so in metrics.jsonl, which is reproducible apart
# from `perf/`, it lies under `perf/`; elsewhere it also has its public name.
PUBLIC_NAMES = {
    "perf/prefix_cache_hit_rate": "rollout/prefix_cache_hit_rate",
    "perf/avg_cached_tokens_per_sample": "rollout/avg_cached_tokens_per_sample",
}


class Tracker:
    """Sends each row of metrics to `metrics.jsonl` and to every other sink that the flags turn on.

    Sinks open at once, or, where `--load` may restore their ids, with `load_state_dict` or the first row. A sink that
    cannot open ends the run with a SinkError. One that fails later is reported once, counted, and tried again with
    every row; the count is logged as `tracking/<sink>_errors`.
    """

    def __init__(self, args: Any) -> None:
        self.args = args
        self.sinks: list[Sink] = [JsonlSink(args)]
        if getattr(args, "use_wandb", False) and getattr(args, "wandb_mode", None) != "disabled":
            self.sinks.append(WandbSink(args))
        if getattr(args, "use_tensorboard", False):
            self.sinks.append(TensorboardSink(args))
        self.errors: Counter[str] = Counter()
        self._is_open = self._is_closed = False
        if not getattr(args, "load", None):
            self._open({}, None)

    def _open(self, state: Mapping[str, Any], resumed_at: int | None) -> None:
        self._is_open = True
        for sink in self.sinks:
            sink.open(dict(state.get(sink.name) or {}), resumed_at)

    def log(self, metrics: Mapping[str, Any], *, step_key: str, step: int) -> None:
        """One row.

        Args:
            metrics: values by full name (`rollout/raw_reward`): numbers, or short texts.
            step_key: the axis: rollout/step, train/step or eval/step.
        """
        if step_key not in STEP_KEYS:
            raise ValueError(f"step_key {step_key!r} is none of {', '.join(STEP_KEYS)}")
        if not metrics:
            return
        if not self._is_open:
            self._open({}, None)
        now = time.time()
        row = {name: _number(value) for name, value in metrics.items()}
        row |= {f"tracking/{name}_errors": float(count) for name, count in sorted(self.errors.items())}
        public = row | {public: row[name] for name, public in PUBLIC_NAMES.items() if name in row}
        for sink in self.sinks:
            try:
                sink.log(row if isinstance(sink, JsonlSink) else public, step_key, int(step), now)
            except Exception as error:
                self._count(sink, error)

    def _count(self, sink: Sink, error: Exception) -> None:
        self.errors[sink.name] += 1
        if self.errors[sink.name] == 1:
            logger.error(
                "metrics sink %s failed: %s: %s. The run goes on; further failures are only counted, as tracking/%s_errors",
                sink.name,
                type(error).__name__,
                error,
                sink.name,
            )

    def compute_rollout_step(self, rollout_id: int) -> int:
        """The step of a rollout on the axes rollout/step and eval/step."""
        return compute_rollout_step(self.args, rollout_id)

    # ---- resume and end ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Ids by which a resumed run goes on in the same places; goes into every checkpoint."""
        return {sink.name: sink.state_dict() for sink in self.sinks}

    def load_state_dict(self, state: Mapping[str, Any], *, resumed_at: int) -> None:
        """Go on from a checkpoint; must come before the first row.

        Args:
            resumed_at: the first rollout id that this process runs. Rows of it and of later ones, which a run logged
                that went further than its checkpoint, are dropped.
        """
        if self._is_open:
            if not getattr(self.args, "load", None):
                raise RuntimeError("the tracker was opened as a new run: a resumed one has --load set")
            raise RuntimeError("the tracker has logged rows already: load its state first")
        self._open(state, resumed_at)

    def close(self) -> None:
        """Write out and end every sink; says which ones lost rows. Harmless when repeated."""
        if self._is_closed:
            return
        self._is_closed = True
        for sink in self.sinks:
            try:
                sink.close()
            except Exception as error:
                self._count(sink, error)
        for name, count in self.errors.items():
            logger.error("metrics sink %s failed %d times during this run; it may lack rows", name, count)


def _number(value: Any) -> Any:
    """NumPy and tensor scalars as Python numbers."""
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        return value.item()
    return value
