"""FLOP counts against a count by hand, and MFU only where the peak is known."""

from types import SimpleNamespace

import pytest

from miles.backends.training_utils.batching.flops import ModelDims
from miles.backends.training_utils.throughput import batch_flops, peak_tflops, throughput_metrics

DIMS = ModelDims(hidden=8, layers=2, heads=2, kv_heads=1, head_dim=4, ffn_active=16, vocab=100)


def test_flops_of_a_batch_counted_by_hand():
    # q, o: 8x8 each; k, v: 8x4 each; three 8x16 in the feed-forward: 576 weights a layer, two FLOPs a weight and token.
    linear = 2 * (2 * 576) * (10 + 6)
    attention = 2 * (2 * 8) * (10**2 + 6**2)
    head = 2 * 8 * 100 * (4 + 3)
    assert batch_flops(DIMS, [10, 6], [4, 3]) == linear + attention + head


def test_the_peak_comes_from_the_flag_or_a_known_device_and_is_never_guessed():
    assert peak_tflops(SimpleNamespace(mfu_peak_tflops=None), "NVIDIA H200") == 989.0
    assert peak_tflops(SimpleNamespace(mfu_peak_tflops=None), "NVIDIA H100 PCIe") == 756.0
    assert peak_tflops(SimpleNamespace(mfu_peak_tflops=100.0), "NVIDIA H200") == 100.0
    assert peak_tflops(SimpleNamespace(), "NVIDIA X9") is None
    assert peak_tflops(SimpleNamespace(), None) is None


def test_training_counts_three_passes_and_parts_that_did_not_run_are_left_out():
    seconds = {"actor_train": 2.0, "log_probs": 1.0, "data_preprocess": 0.1}
    metrics = throughput_metrics(4e12, seconds, 12.0)
    assert metrics == {
        "perf/actor_train_tflops": pytest.approx(6.0),
        "perf/log_probs_tflops": pytest.approx(4.0),
        "perf/mfu_peak_tflops": 12.0,
        "perf/actor_train_mfu": pytest.approx(0.5),
    }
    assert "perf/actor_train_mfu" not in throughput_metrics(4e12, seconds, None)
