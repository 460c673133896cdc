"""Gradients do not depend on how a batch is split.

The same 12 sequences go through the FSDP trainer as few large or many small micro-batches, packed into one row or padded,
on 1 and on 2 gloo ranks, in fp32. Two differences are taken for each configuration:

- split: against the first configuration, the largest over tensors of max |g - first| / max |first|;
- exact: against plain torch autograd of the loss written out, over transformers' own forward, one sequence at a time, in
  fp64: |g - exact| / |exact| in the L2 norm of the whole gradient. (Not by tensor: gradients of key biases nearly cancel,
  and fp32 cannot do better there, whoever computes them.) What plain transformers gets in fp32 is the reference.

    python -m tests.benchmarks.gradient_invariance
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.helpers.gloo_world import World
from tests.helpers.tiny_models import FAMILIES, make_tiny_model

LIMIT = 1e-6
TEMPERATURE, CLIP, KL, ENTROPY = 0.8, 0.2, 0.05, 0.01


def make_args(model_dir: str, **fields: Any) -> SimpleNamespace:
    """The flags that the trainer reads for this loss."""
    args = {
        "hf_checkpoint": model_dir,
        "train_device": "cpu",
        "lr": 1e-3,
        "loss_type": "policy_loss",
        "advantage_estimator": "grpo",
        "eps_clip": CLIP,
        "use_kl_loss": True,
        "kl_loss_coef": KL,
        "kl_loss_type": "k3",
        "entropy_coef": ENTROPY,
        "rollout_temperature": TEMPERATURE,
        "rollout_batch_size": 12,
        "n_samples_per_prompt": 1,
        "global_batch_size": 11,
        "micro_batch_size": 1,
        "qkv_format": "thd",
        "seed": 0,
    }
    return SimpleNamespace(**args | fields)


def make_batch() -> dict[str, Any]:
    """12 ragged sequences of 11 rollouts (two are siblings), with masks, old and reference log-probs and advantages.

    Two groups of them, of 4 and 2, start with the same prompt."""
    import torch

    g = torch.Generator().manual_seed(5)

    def floats(n: int, scale: float, shift: float = 0.0) -> Any:
        return torch.randn(n, generator=g) * scale + shift

    prompts = torch.randint(1, 9, (12,), generator=g).tolist()
    groups = {2: 2, 3: 2, 6: 2, 9: 2, 7: 7, 8: 7}  # sequence -> the first with the same prompt
    for member, first in groups.items():
        prompts[member] = prompts[first]
    responses = torch.randint(2, 40, (12,), generator=g).tolist()
    masks = [(torch.rand(n, generator=g) > 0.25).int() for n in responses]
    for mask in masks:
        mask[0] = 1
    rollout_ids = [0, 1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10]
    sums = [sum(int(m.sum()) for m, r in zip(masks, rollout_ids, strict=True) if r == own) for own in rollout_ids]
    totals = [p + r for p, r in zip(prompts, responses, strict=True)]
    tokens = [torch.randint(3, 300, (n,), generator=g) for n in totals]
    for member, first in groups.items():
        tokens[member][: prompts[first]] = tokens[first][: prompts[first]]
    return {
        "tokens": tokens,
        "total_lengths": totals,
        "response_lengths": responses,
        "loss_masks": [m.tolist() for m in masks],
        "rollout_ids": rollout_ids,
        "rollout_mask_sums": sums,
        "rewards": [0.0] * 12,
        "log_probs": [floats(n, 0.3, -5.8) for n in responses],
        "ref_log_probs": [floats(n, 0.3, -5.8) for n in responses],
        "advantages": [floats(n, 1.0) for n in responses],
    }


def reference_gradients(model_dir: str, batch: dict[str, Any], *, dtype: str, padded: bool) -> dict[str, Any]:
    """d loss / d parameter by plain autograd: the formula of the clipped loss with k3 KL and entropy, nothing shared."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype))
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped kernel has no fp64
    tokens = batch["tokens"]
    if padded:
        ids = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(t) for t in tokens], batch_first=True)
        logits = list(model(input_ids=ids, attention_mask=mask).logits)
    else:
        logits = [model(input_ids=t[None]).logits[0] for t in tokens]
    loss = 0.0
    for i, response in enumerate(batch["response_lengths"]):
        n = len(tokens[i])
        log_p = torch.log_softmax(logits[i][n - response - 1 : n - 1] / TEMPERATURE, dim=-1)
        new = log_p.gather(-1, tokens[i][n - response :, None])[:, 0]
        old, ref, advantage = (batch[k][i].to(new.dtype) for k in ("log_probs", "ref_log_probs", "advantages"))
        ratio = torch.exp(new - old)
        surrogate = -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        kl = torch.exp(ref - new) - 1 - (ref - new)
        entropy = -(log_p.exp() * log_p).sum(-1)
        mask_i = torch.tensor(batch["loss_masks"][i], dtype=new.dtype)
        per_token = surrogate + KL * kl - ENTROPY * entropy
        loss = loss + (per_token * mask_i).sum() / batch["rollout_mask_sums"][i] / 11
    loss.backward()
    return {name: p.grad.double() for name, p in model.named_parameters()}


def trainer_gradients(args: SimpleNamespace, batch: dict[str, Any]) -> dict[str, Any]:
    """The trainer's gradient of one optimizer step over `batch`, whole, by parameter name. Runs on every rank of a world."""
    from miles.backends.fsdp_utils.backend import FSDPBackend
    from miles.backends.training_utils.batching.planner import plan_batches
    from miles.backends.training_utils.batching.shards import split_train_data

    backend = FSDPBackend(args)
    backend.load()
    plan = plan_batches(batch, backend.parallel, args)
    shard = split_train_data(batch, plan, rollout_id=0)[backend.dp_rank]
    backend.runner.accumulate_gradients(shard, shard.steps[0], old_is_current=False)
    named = backend.actor.module.named_parameters()
    return {name.removeprefix("hf."): p.grad.full_tensor().double() for name, p in named}


@dataclass(frozen=True)
class Difference:
    split: float
    exact: float


def by_tensor(ours: dict[str, Any], reference: dict[str, Any]) -> float:
    """Largest over tensors of max |g - reference| / max |reference|."""
    if ours.keys() != reference.keys():
        raise ValueError(f"parameters differ: {sorted(ours.keys() ^ reference.keys())}")
    return max(float((ours[n] - g).abs().max() / g.abs().max()) for n, g in reference.items())


def of_whole(ours: dict[str, Any], reference: dict[str, Any]) -> float:
    """L2 norm of the difference over that of the reference, all tensors together."""
    squares = sum(float((ours[n] - g).square().sum()) for n, g in reference.items())
    return (squares / sum(float(g.square().sum()) for g in reference.values())) ** 0.5


def measure(model_dir: str, worlds: dict[int, World], batch: dict[str, Any]) -> dict[str, Difference]:
    """Differences by configuration: `{ranks}r {micro-batches}x{sequences} packed|padded`."""
    exact = reference_gradients(model_dir, batch, dtype="float64", padded=False)
    first: dict[str, Any] | None = None
    result = {}
    for ranks, world in worlds.items():
        for count in (1, 3, 12 // ranks):
            size = 12 // ranks // count
            for layout, name in (("thd", "packed"), ("bshd", "padded")):
                args = make_args(model_dir, qkv_format=layout, micro_batch_size=size)
                gradients = world.run(trainer_gradients, args, batch)[0]
                first = first or gradients
                difference = Difference(by_tensor(gradients, first), of_whole(gradients, exact))
                result[f"{ranks}r {count}x{size} {name}"] = difference
    return result


def main() -> None:
    batch = make_batch()
    measured: dict[str, dict[str, Difference]] = {}
    floor: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, World(1) as one, World(2) as two:
        for family in FAMILIES:
            model_dir = str(make_tiny_model(Path(folder) / family, family))
            measured[family] = measure(model_dir, {1: one, 2: two}, batch)
            exact = reference_gradients(model_dir, batch, dtype="float64", padded=False)
            floor[family] = of_whole(reference_gradients(model_dir, batch, dtype="float32", padded=True), exact)
            for name, value in measured[family].items():
                print(f"{family:10} {name:16} split {value.split:.2e}  exact {value.exact:.2e}")
            print(f"{family:10} transformers                      exact {floor[family]:.2e}")
    every = [value for values in measured.values() for value in values.values()]
    split, exact_worst, reference = max(v.split for v in every), max(v.exact for v in every), max(floor.values())
    summary = {
        "benchmark": "gradient_invariance",
        "measured": exact_worst,
        "reference": reference,
        "ratio": exact_worst / reference,
        "between_splits": split,
        "limit": LIMIT,
        "within_limit": max(split, exact_worst) <= LIMIT,
        "by_configuration": {f: {n: asdict(v) for n, v in values.items()} for f, values in measured.items()},
    }
    print(json.dumps(summary))
    if not summary["within_limit"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
