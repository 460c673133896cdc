"""The critic on the FSDP trainer: its head, its values and their loss, its checkpoints."""

from pathlib import Path

import pytest
import torch

from miles.backends.fsdp_utils.backend import FSDPBackend
from miles.backends.fsdp_utils.loading import reshard
from miles.backends.training_utils.checkpoint import CheckpointError
from miles.backends.training_utils.critic import HEAD_STD, critic_args
from tests.fast.fsdp_utils import jobs
from tests.fast.fsdp_utils.jobs import make_args, make_batch

PPO = dict(
    advantage_estimator="ppo",
    gamma=1.0,
    lambd=0.95,
    value_clip=0.2,
    critic_lr=0.02,
    critic_lr_warmup_iters=0,
    critic_load=None,
    critic_save=None,
    min_lr=0.0,
    lr_decay_style="constant",
)


def critic_of(args, start=0):
    backend = FSDPBackend(critic_args(args, start), role="critic")
    return backend, backend.load()


def whole_weights(backend):
    reshard(backend.actor.module)
    return {n: p.full_tensor().detach().clone() for n, p in backend.actor.module.named_parameters()}


def train(args, data, steps):
    backend, _ = critic_of(args)
    head = whole_weights(backend)["hf.lm_head.weight"]
    shards = [jobs.shard_of(backend, data) for _ in range(steps)]
    metrics = [backend.train(shard) for shard in shards]
    values = [torch.as_tensor(v) for v in shards[0].columns["values"]]
    index = shards[0].columns["sample_indices"]
    return head, dict(zip(index, values, strict=True)), [jobs.untimed(m)[-1] for m in metrics]


def test_a_critic_starts_near_zero_and_learns_what_its_states_are_worth(world, models):
    data = make_batch()
    ranks = world.run(train, make_args(models["qwen3"], **PPO), data, 8)
    head, _, metrics = ranks[0]
    assert head.shape[0] == 1 and float(head.std()) == pytest.approx(HEAD_STD, rel=0.3)
    assert all(torch.equal(head, other[0]) for other in ranks), "one head on all ranks"
    losses = [m["train/value_loss"] for m in metrics]
    assert losses[-1] < losses[0] / 2
    assert metrics[-1]["train/value_explained_variance"] > metrics[0]["train/value_explained_variance"]
    assert "train/pg_loss" not in metrics[0] and "train/train_rollout_kl" not in metrics[0]
    lengths = dict(zip(data["sample_indices"], data["response_lengths"], strict=True))
    for _, values, _ in ranks:
        assert {i: len(v) for i, v in values.items()} == {i: lengths[i] for i in values}


def value_by_hand(args, data):
    """Values from a plain transformers model, each sample alone, beside the critic's."""
    import transformers

    backend, _ = critic_of(args)
    shard = jobs.shard_of(backend, data)
    found = dict(zip(shard.columns["sample_indices"], backend.score(shard, "critic"), strict=True))
    head = whole_weights(backend)["hf.lm_head.weight"][0]
    model = transformers.AutoModel.from_pretrained(args.hf_checkpoint, dtype=torch.float32)
    want = {}
    with torch.no_grad():
        for i in found:
            ids = torch.tensor(data["tokens"][i])
            hidden = model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
            want[i] = (hidden @ head)[len(ids) - data["response_lengths"][i] - 1 : -1]
    return found, want


def test_the_value_of_a_token_is_that_of_the_state_before_it(world, models):
    for found, want in world.run(value_by_hand, make_args(models["qwen3"], **PPO), make_batch()):
        for i in want:
            torch.testing.assert_close(found[i], want[i], rtol=1e-4, atol=1e-5)


def save_and_resume(args, data, folder):
    backend, _ = critic_of(args)
    backend.train(jobs.shard_of(backend, data))
    jobs.save(backend, folder, 0)
    weights = whole_weights(backend)
    ahead = jobs.untimed(backend.train(jobs.shard_of(backend, data)))

    resumed, start = critic_of(type(args)(**vars(args) | {"critic_load": folder}), start=1)
    restored = whole_weights(resumed)
    same = all(torch.equal(weights[n], restored[n]) for n in weights)
    again = jobs.untimed(resumed.train(jobs.shard_of(resumed, data)))
    _, warm_start = critic_of(type(args)(**vars(args) | {"critic_load": folder}))
    error = None
    try:
        critic_of(type(args)(**vars(args) | {"critic_load": folder}), start=5)
    except CheckpointError as raised:
        error = str(raised)
    return start, same, ahead == again, warm_start, error


def test_a_resumed_critic_goes_on_as_if_nothing_had_happened(world, models, tmp_path: Path):
    args = make_args(models["qwen3"], **PPO)
    for start, same, goes_on, warm_start, error in world.run(save_and_resume, args, make_batch(), str(tmp_path / "c")):
        assert start == 1 and same and goes_on
        assert warm_start == 0, "beside a fresh actor it brings its weights alone"
        assert "no checkpoint 4" in error, "never another rollout's than the actor's"
