"""Flags of a run as far as rewards read them, and samples as the engine leaves them."""

import asyncio
from types import SimpleNamespace

import pytest

from miles.rollout.rm_hub import close_rewards
from miles.utils.imports import register_function
from miles.utils.types import Sample, SampleStatus


@pytest.fixture(scope="module", autouse=True)
def workers_end_with_the_module():
    yield
    asyncio.run(close_rewards())


@pytest.fixture
def args():
    return SimpleNamespace(
        rm_type=None,
        custom_rm_path=None,
        rm_url=None,
        reward_key=None,
        custom_reward_post_process_path=None,
        reward_timeout=20.0,
        reward_num_workers=1,
        rollout_seed=7,
    )


@pytest.fixture
def custom(args):
    """Make a function the run's `--custom-rm-path`."""

    def install(function, path="custom_reward.of_this_test"):
        register_function(path, function)
        args.custom_rm_path = path
        return path

    return install


def finished(response="", label=None, index=0, **fields):
    return Sample(index=index, response=response, label=label, status=SampleStatus.COMPLETED, **fields)
