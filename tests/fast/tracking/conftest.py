"""Flags of a run as far as tracking reads them, and samples as training sees them."""

from types import SimpleNamespace

import pytest

from miles.utils.types import Sample, SampleStatus, VersionSpan


@pytest.fixture
def args(tmp_path):
    return SimpleNamespace(
        run_dir=str(tmp_path / "run"),
        run_name="run",
        load=None,
        rollout_batch_size=2,
        n_samples_per_prompt=2,
        global_batch_size=4,
        rollout_num_gpus=1,
        reward_key=None,
    )


def trained(index=0, group=0, length=4, reward=1.0, version=None, **fields):
    """A completed sample of `length` sampled tokens, all of one weight version."""
    spans = [] if version is None else [VersionSpan(version, 0, length)]
    return Sample(
        index=index,
        group_index=group,
        response="x" * length,
        response_length=length,
        tokens=list(range(length + 2)),
        reward=reward,
        status=fields.pop("status", SampleStatus.COMPLETED),
        version_spans=fields.pop("version_spans", spans),
        **fields,
    )
