"""The name under which older launch commands ask for the default rollout function."""

from miles.rollout.inference_rollout import InferenceRolloutFn as generate_rollout

__all__ = ["generate_rollout"]
