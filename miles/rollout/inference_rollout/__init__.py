"""The default rollout function."""

from miles.rollout.inference_rollout.inference_rollout_common import InferenceRolloutFn

__all__ = ["InferenceRolloutFn"]
