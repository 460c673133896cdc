"""When the driver saves, evaluates and updates the engines' weights: `cluster.due.save(step)`."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Intervals:
    """The run's periodic actions. Rollouts count from 0, so that rollout `interval - 1` is the first one due."""

    def __init__(self, args: Any, first: int, num_rollout: int, rollouts_per_epoch: int | None) -> None:
        self._args, self._first, self._last = args, first, num_rollout - 1
        self._per_epoch = rollouts_per_epoch if args.num_epoch else None

    def save(self, rollout_id: int) -> bool:
        """Every `--save-interval` rollouts, at an epoch's end, at the last one, and when the sentinel file exists."""
        args = self._args
        if not (args.save or args.save_hf):
            return False
        sentinel = args.save_trigger_sentinel
        if sentinel and Path(sentinel).exists():
            return True
        return args.save_interval is not None and (
            rollout_id == self._last or self._is_due(rollout_id, args.save_interval)
        )

    def evaluate(self, rollout_id: int) -> bool:
        """Every `--eval-interval` rollouts, and at an epoch's end."""
        return self._is_due(rollout_id, self._args.eval_interval)

    def evaluate_before_train(self, rollout_id: int) -> bool:
        """Once, before the first step of this process."""
        args = self._args
        return rollout_id == self._first and args.eval_interval is not None and not args.skip_eval_before_train

    def update(self, rollout_id: int) -> bool:
        """Every `--update-weights-interval` rollouts."""
        return (rollout_id + 1) % self._args.update_weights_interval == 0

    def _is_due(self, rollout_id: int, interval: int | None) -> bool:
        if interval is None:
            return False
        at_epoch_end = self._per_epoch is not None and (rollout_id + 1) % self._per_epoch == 0
        return (rollout_id + 1) % interval == 0 or at_epoch_end
