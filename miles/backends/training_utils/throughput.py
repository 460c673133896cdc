"""How fast the trainer computes: model FLOP/s of each pass, and their share of the device's peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from miles.backends.training_utils.batching.flops import ModelDims, sequence_flops

# Dense bf16 peak of one device in TFLOP/s, by a part of its name. Longer names first: "H100 PCIe" before "H100".
_PEAKS = {
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "GB200": 2500.0,
    "B200": 2250.0,
    "H200": 989.0,
    "H100": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
}
# Passes over the weights that a timed part makes: forward is one, backward two more.
_PASSES = {"log_probs": 1.0, "ref_log_probs": 1.0, "teacher_log_probs": 1.0, "actor_train": 3.0}


def peak_tflops(args: Any, device_name: str | None) -> float | None:
    """`--mfu-peak-tflops`, or what the device is known for; None where nobody knows, so that no MFU is made up."""
    given = getattr(args, "mfu_peak_tflops", None)
    if given:
        return float(given)
    return next((peak for part, peak in _PEAKS.items() if device_name and part in device_name), None)


def batch_flops(dims: ModelDims, total_lengths: Sequence[int], response_lengths: Sequence[int]) -> float:
    """FLOPs of one forward pass over the samples; the head runs on response rows only."""
    body = replace(dims, vocab=0)
    head = 2.0 * dims.hidden * dims.vocab * sum(response_lengths)
    return sum(sequence_flops(n, body) for n in total_lengths) + head


def throughput_metrics(flops: float, seconds: dict[str, float], peak: float | None) -> dict[str, float]:
    """`perf/{part}_tflops` of one device, and `perf/actor_train_mfu` where the peak is known.

    Args:
        flops: of one forward pass over this device's samples.
        seconds: time of each part; those that did not run are left out.
    """
    metrics = {
        f"perf/{part}_tflops": passes * flops / seconds[part] / 1e12
        for part, passes in _PASSES.items()
        if seconds.get(part)
    }
    if peak is not None and "perf/actor_train_tflops" in metrics:
        metrics["perf/mfu_peak_tflops"] = peak
        metrics["perf/actor_train_mfu"] = metrics["perf/actor_train_tflops"] / peak
    return metrics
