"""The default rollout function: one batch of groups from the engines, complete and in order, or a clear error."""

from __future__ import annotations

from miles.rollout.base_types import (
    RolloutFnConstructorInput,
    RolloutFnEvalInput,
    RolloutFnEvalOutput,
    RolloutFnInput,
    RolloutFnTrainInput,
    RolloutFnTrainOutput,
)
from miles.rollout.eval_config import load_eval_configs
from miles.rollout.evaluation import Evaluator, check_rewards
from miles.rollout.failures import first_index
from miles.rollout.generate_state import GenerateState
from miles.rollout.inference_rollout.batch import BatchCollector
from miles.utils.imports import load_function


class InferenceRolloutFn:
    """Samples `--rollout-batch-size` groups for a training step; evaluates on the same engines.

    Without over-sampling exactly the missing groups are requested, so the batch is the first accepted groups of the data
    source, whatever order they finish in: the same seed gives the same batch. With `--over-sampling-batch-size` above the
    batch size, groups are requested in bursts of that many and those that finish first are taken (of several that finish
    together, the earliest prompts), which depends on timing by design.
    """

    def __init__(self, input: RolloutFnConstructorInput) -> None:
        self.args = input.args
        self.data_source = input.data_source
        self.engines = input.engines
        self.dynamic_filter = load_function(getattr(self.args, "dynamic_sampling_filter_path", None))
        self.sample_filter = load_function(getattr(self.args, "rollout_sample_filter_path", None))
        self.all_samples_process = load_function(getattr(self.args, "rollout_all_samples_process_path", None))
        self._state: GenerateState | None = None
        self._evaluator: Evaluator | None = None
        if not getattr(self.args, "debug_train_only", False):
            self._prepare()

    def _prepare(self) -> None:
        """Check rewards, load tokenizer, hooks and evaluation data now, so that what is wrong with them is said at startup."""
        check_rewards(self.args, getattr(self.data_source, "rows", None) or [])
        self._state = GenerateState(self.args, self.engines)
        if load_eval_configs(self.args):
            self._evaluator = Evaluator(self.args, self._state)

    @property
    def state(self) -> GenerateState:
        if self._state is None:
            self._prepare()
        assert self._state is not None
        return self._state

    async def __call__(self, input: RolloutFnInput) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
        if isinstance(input, RolloutFnEvalInput):
            return await self._evaluate(input)
        return await self._train(input)

    async def _evaluate(self, input: RolloutFnEvalInput) -> RolloutFnEvalOutput:
        state = input.generate_state or self.state
        if self._evaluator is None:
            raise ValueError("nothing to evaluate: set --eval-prompt-data NAME PATH or --eval-config FILE")
        return await self._evaluator.run(state)

    async def _train(self, input: RolloutFnTrainInput) -> RolloutFnTrainOutput:
        batch = BatchCollector(self.args, self.state, self.data_source, self.dynamic_filter, input.rollout_id)
        self.state.reset()
        try:
            await batch.collect()
            await batch.finish()
        finally:
            await batch.stop()
            self.state.reset()
        groups = sorted(batch.kept, key=first_index)
        if self.sample_filter is not None:
            self.sample_filter(self.args, groups)
        if self.all_samples_process is not None:
            everything = sorted(batch.finished, key=first_index)
            self.all_samples_process(self.args, everything, self.data_source.get_samples)
        return RolloutFnTrainOutput(samples=groups, metrics=batch.metrics())  # type: ignore[arg-type]
