"""Evaluation on the engines: every data set concurrently, each prompt sampled as often as its data set says."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections import Counter
from typing import Any

from miles.rollout.base_types import RolloutFnEvalOutput
from miles.rollout.dataset import DatasetKeys, PromptRow, load_prompt_rows
from miles.rollout.eval_config import EvalDatasetConfig, load_eval_configs
from miles.rollout.failures import flatten
from miles.rollout.generate_and_rm import generate_and_rm_group
from miles.rollout.generate_state import GenerateState
from miles.rollout.rm_hub import RewardConfigError, prompt_row_problems, reward_problems
from miles.utils.seeds import derive_seed
from miles.utils.types import Group, RewardSpec, Sample, SampleStatus

logger = logging.getLogger(__name__)


class Evaluator:
    """Reads the data sets once and runs them as often as asked.

    Raises: at once, for data or a generate function that cannot be used, not at the first evaluation.
    """

    def __init__(self, args: Any, state: GenerateState) -> None:
        self.args = _with_eval_reward_key(args)
        self.configs = load_eval_configs(args)
        for config in self.configs:
            state.generate_function_for(config.custom_generate_function_path)
        self._rows = {config.name: self._load(config, state.tokenizer) for config in self.configs}
        for config in self.configs:
            own = {"rm_type": config.rm_type} if config.rm_type else {}
            check_rewards(self.args, self._rows[config.name], config.metadata_overrides | own)

    def _load(self, config: EvalDatasetConfig, tokenizer: Any) -> list[PromptRow]:
        keys = DatasetKeys.of_eval(self.args, config)
        rows, _ = load_prompt_rows(self.args, config.path, keys, tokenizer, max_prompt_len=config.max_prompt_len)
        return rows

    async def run(self, state: GenerateState) -> RolloutFnEvalOutput:
        """Evaluate all data sets. A sample that failed, its reward included, has reward None and is only counted."""
        state = copy.copy(state)  # the same engines and limits under this evaluation's own reward key
        state.args = self.args
        results = await asyncio.gather(*(self._run_dataset(state, config) for config in self.configs))
        data: dict[str, dict[str, list]] = {}
        for config, samples in zip(self.configs, results, strict=True):
            rewards = [self._reward(sample) for sample in samples]
            _report_failures(config.name, samples)
            truncated = [sample.status is SampleStatus.TRUNCATED for sample in samples]
            data[config.name] = {"rewards": rewards, "truncated": truncated, "samples": samples}
        return RolloutFnEvalOutput(data=data)

    def _reward(self, sample: Sample) -> float | None:
        if sample.reward is None or sample.status not in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED):
            return None
        if isinstance(sample.reward, dict) and getattr(self.args, "reward_key", None):
            return sample.reward[self.args.reward_key]
        return sample.reward  # type: ignore[return-value]

    async def _run_dataset(self, state: GenerateState, config: EvalDatasetConfig) -> list[Sample]:
        params = config.sampling_params(state.sampling_params)
        tasks = [self._run_group(state, config, params, group) for group in self._groups(config)]
        return flatten([entry for results in await asyncio.gather(*tasks) for entry in results])

    def _groups(self, config: EvalDatasetConfig) -> list[Group]:
        """One group a prompt; indices count through the data set."""
        n = config.n_samples_per_eval_prompt
        groups = []
        for group_index, row in enumerate(self._rows[config.name]):
            group = []
            for i in range(n):
                sample = Sample(group_index=group_index, index=group_index * n + i, label=row.label)
                sample.prompt = copy.deepcopy(row.prompt)
                sample.metadata = copy.deepcopy(row.metadata) | copy.deepcopy(config.metadata_overrides)
                sample.generate_function_path = config.custom_generate_function_path
                sample.reward_spec = RewardSpec(rm_type=config.rm_type) if config.rm_type else None
                group.append(sample)
            groups.append(group)
        return groups

    async def _run_group(
        self, state: GenerateState, config: EvalDatasetConfig, params: dict[str, Any], group: Group
    ) -> list[Sample | list[Sample]]:
        seeds = [derive_seed(self.args.rollout_seed, "eval", config.name, s.index) for s in group]  # type: ignore[arg-type]
        return await generate_and_rm_group(state, group, params, evaluation=True, seeds=seeds)


def _report_failures(name: str, samples: list[Sample]) -> None:
    failures = [sample.failure for sample in samples if sample.failure is not None]
    if failures:
        counts = ", ".join(f"{category} {n}" for category, n in Counter(f.category for f in failures).most_common())
        logger.warning(
            "evaluation %s: %d of %d samples failed and have no score (%s); the first: %s",
            name,
            len(failures),
            len(samples),
            counts,
            failures[0].message,
        )


def _with_eval_reward_key(args: Any) -> Any:
    key = getattr(args, "eval_reward_key", None)
    if key is None or key == getattr(args, "reward_key", None):
        return args
    args = copy.copy(args)
    args.reward_key = key
    return args


def check_rewards(args: Any, rows: list[PromptRow], overrides: dict[str, Any] | None = None) -> None:
    """Raises: RewardConfigError for rows whose reward cannot work, before a single token is sampled.

    Args:
        overrides: metadata that every row gets on top of its own.
    """
    problems = [*reward_problems(args), *prompt_row_problems(args, rows, overrides)]
    if problems:
        raise RewardConfigError("\n".join(problems))
