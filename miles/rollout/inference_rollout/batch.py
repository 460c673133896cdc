"""One batch being collected: request groups, take what finishes, end the rest."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from miles.rollout.data_source import DataSource
from miles.rollout.failures import FINAL, FailureLog, RolloutError, first_index, group_failures
from miles.rollout.filter_hub.base_types import call_dynamic_filter
from miles.rollout.generate_and_rm import Execution, generate_and_rm_group
from miles.rollout.generate_state import GenerateState
from miles.rollout.inference_rollout.cutoff import cut_off
from miles.utils.types import Group, Sample

logger = logging.getLogger(__name__)

# A filter that keeps less than one group in this many is broken, or the data is: stop instead of sampling forever.
MAX_GROUPS_PER_KEPT = 64


class BatchCollector:
    """The tasks of one batch, what they gave, and what became of that."""

    def __init__(
        self, args: Any, state: GenerateState, data_source: DataSource, dynamic_filter: Callable | None, rollout_id: int
    ) -> None:
        self.args, self.state, self.data_source, self.dynamic_filter = args, state, data_source, dynamic_filter
        self.rollout_id = rollout_id
        self.target = args.rollout_batch_size
        over = getattr(args, "over_sampling_batch_size", None) or self.target
        self.burst = over if over > self.target else None
        self.tasks: dict[asyncio.Task, Group] = {}
        self.kept: list[list[Execution]] = []
        self.finished: list[list[Execution]] = []  # kept and filtered ones
        self.surplus: list[list[Execution]] = []  # good, but no room for them
        self.drops: Counter[str] = Counter()
        self.failures = FailureLog(getattr(args, "max_failed_group_ratio", 0.5), self.target)
        self.requested = 0
        self.recycled = self.cut = 0

    # ---- collecting ----------------------------------------------------------------------------------------------

    async def collect(self) -> None:
        """Request groups and take finished ones until the batch is full."""
        while len(self.kept) < self.target:
            self._refill()
            if not self.tasks:
                raise self._too_few_kept()
            done, _ = await asyncio.wait(self.tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda t: first_index(self.tasks[t])):
                self.tasks.pop(task)
                self._take(task.result())
            replaced = max(0, self.target - len(self.kept) - len(self.tasks))
            self.failures.check(self.requested + replaced)

    def _refill(self) -> None:
        missing = self.target - len(self.kept) - len(self.tasks)
        bound = MAX_GROUPS_PER_KEPT * self.target
        while missing > 0 and self.requested < bound:
            groups = self.data_source.get_samples(self.burst or min(missing, bound - self.requested))
            self._check_groups(groups)
            for group in groups:
                task = asyncio.create_task(generate_and_rm_group(self.state, group, self.state.sampling_params))
                self.tasks[task] = group
            self.requested += len(groups)
            missing -= len(groups)

    def _check_groups(self, groups: list[Group]) -> None:
        n = self.args.n_samples_per_prompt
        source = type(self.data_source).__name__
        if not groups:
            raise RolloutError(f"{source}.get_samples returned no groups: the data source is exhausted")
        for group in groups:
            if len(group) != n:
                raise RolloutError(f"{source} gave a group of {len(group)} samples; --n-samples-per-prompt is {n}")
            if any(s.index is None or s.group_index is None for s in group):
                raise RolloutError(f"{source} gave samples without index or group_index; seeds and order need both")

    def _take(self, group: list[Execution]) -> None:
        failed = group_failures(group)
        if failed:
            self.failures.add(failed)
            return
        self.finished.append(group)
        verdict = call_dynamic_filter(self.dynamic_filter, self.args, group)
        if not verdict.keep:
            self.drops[verdict.reason or "unnamed"] += 1
        elif len(self.kept) < self.target:
            self.kept.append(group)
        else:
            self.surplus.append(group)

    def _too_few_kept(self) -> RolloutError:
        reasons = ", ".join(f"{name} {count}" for name, count in sorted(self.drops.items()))
        return RolloutError(
            f"rollout {self.rollout_id}: only {len(self.kept)} of {self.target} groups were kept after {self.requested} were "
            f"generated (failed {self.failures.groups}; dropped by the dynamic filter: {reasons}). Check the reward and "
            f"--dynamic-sampling-filter-path {getattr(self.args, 'dynamic_sampling_filter_path', None)}."
        )

    # ---- ending --------------------------------------------------------------------------------------------------

    async def finish(self) -> None:
        """Cut off what is still being generated; with `--partial-rollout` give it back to the data source."""
        if not self.tasks and not self.surplus:
            return
        unfinished = await cut_off(self.state, self.tasks)
        self.cut = len(unfinished) + len(self.surplus)
        if not getattr(self.args, "partial_rollout", False):
            return
        recycled = [self._fresh(group) if all(s.status in FINAL for s in group) else group for group in unfinished]
        for finished in self.surplus:
            samples = [entry for entry in finished if isinstance(entry, Sample)]
            if len(samples) == len(finished):  # what an execution made of several samples cannot be handed out again
                recycled.append(self._fresh(samples))
        for group in recycled:
            self._stamp(group)
        recycled.sort(key=first_index)
        self.data_source.add_samples(recycled)
        self.recycled = len(recycled)

    def _fresh(self, finished: Group) -> Group:
        """A finished group for the next rollout: from the start again where its tokens would be masked out anyway."""
        if getattr(self.args, "mask_offpolicy_in_partial_rollout", False):
            for sample in finished:
                sample.reset_for_retry()
        return finished

    def _stamp(self, group: Group) -> None:
        """Note where a partial sample began; mask its tokens out where off-policy tokens shall not train."""
        mask = getattr(self.args, "mask_offpolicy_in_partial_rollout", False)
        for sample in group:
            if sample.response_length == 0:
                continue
            sample.metadata.setdefault("start_rollout_id", self.rollout_id)
            if mask:
                sample.loss_mask = [0] * sample.response_length

    async def stop(self) -> None:
        """End every task that is left, whatever happened."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.tasks.clear()

    def metrics(self) -> dict[str, float]:
        out: dict[str, float] = {f"rollout/dynamic_filter/drop_{name}": n for name, n in sorted(self.drops.items())}
        if self.failures.groups:
            out |= self.failures.metrics()
        if self.burst:
            out |= {
                "rollout/over_sampling/requested_groups": self.requested,
                "rollout/over_sampling/cut_groups": self.cut,
            }
        if self.recycled:
            out["rollout/partial_rollout/recycled_groups"] = self.recycled
        return out
