"""The estimators by the names of `--advantage-estimator`."""

from __future__ import annotations

from miles.backends.training_utils.loss_hub.base import Estimator
from miles.backends.training_utils.loss_hub.cispo import CISPO
from miles.backends.training_utils.loss_hub.grpo import GRPO
from miles.backends.training_utils.loss_hub.gspo import GSPO
from miles.backends.training_utils.loss_hub.ppo import PPO
from miles.backends.training_utils.loss_hub.reinforce_plus_plus import REINFORCE_PLUS_PLUS
from miles.backends.training_utils.loss_hub.reinforce_plus_plus_baseline import REINFORCE_PLUS_PLUS_BASELINE

ESTIMATORS: dict[str, Estimator] = {
    estimator.name: estimator
    for estimator in (GRPO, GSPO, CISPO, PPO, REINFORCE_PLUS_PLUS, REINFORCE_PLUS_PLUS_BASELINE)
}


def get_estimator(name: str) -> Estimator:
    """The estimator, or ValueError with the names there are."""
    if name not in ESTIMATORS:
        raise ValueError(f"--advantage-estimator {name!r} is not one of {', '.join(ESTIMATORS)}")
    return ESTIMATORS[name]
