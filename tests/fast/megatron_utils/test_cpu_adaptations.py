"""The CPU adaptations say what is wrong instead of half working."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from miles.backends.megatron_utils import cpu_adaptations
from miles.backends.megatron_utils.cpu_adaptations import AdaptationError


def test_they_are_refused_where_a_gpu_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(AdaptationError, match="sees a GPU"):
        cpu_adaptations.install()


def test_another_version_is_named_with_those_that_were_tested(monkeypatch: pytest.MonkeyPatch):
    from megatron.core import package_info

    monkeypatch.setattr(package_info, "__version__", "0.99.0")
    with pytest.raises(AdaptationError, match=r"megatron-core 0\.99\.0 was not tested.*0\.16\.1"):
        cpu_adaptations.install()


def test_a_name_that_is_gone_is_told_and_nothing_is_replaced(monkeypatch: pytest.MonkeyPatch):
    from megatron.core.tensor_parallel import random

    before = torch.cuda.current_device
    monkeypatch.delattr(random, "_get_cuda_rng_state")
    with pytest.raises(AdaptationError, match="_get_cuda_rng_state no longer exist"):
        cpu_adaptations.install()
    assert torch.cuda.current_device is before


def test_the_package_imports_without_megatron():
    code = "import sys; sys.modules['megatron'] = None; import miles.backends.megatron_utils.platform, miles.ray.train_actor"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
