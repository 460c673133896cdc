"""The FSDP trainer on a GPU: bf16, packed rows through flash attention, memory given back and taken again."""

import pytest
import torch

from miles.backends.fsdp_utils.layout import PackedLayout
from miles.backends.fsdp_utils.packed_attention import packed_attention
from miles.backends.fsdp_utils.state import local_bytes
from tests.benchmarks import gradient_invariance as invariance
from tests.fast.fsdp_utils import jobs
from tests.fast.fsdp_utils.jobs import make_batch
from tests.helpers.gloo_world import World
from tests.helpers.tiny_models import make_tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def world():
    with World(1, backend="cpu:gloo,cuda:nccl") as running:
        yield running


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {f: str(make_tiny_model(root / f, f)) for f in ("qwen3", "qwen3_moe")}


def gpu_args(model, **fields):
    return jobs.make_args(model, **{"train_device": "cuda", "lr": 1e-3} | fields)


@pytest.mark.parametrize(("family", "limit"), [("qwen3", 0.03), ("qwen3_moe", 0.2)])
def test_bf16_gradients_of_packed_rows_are_near_the_exact_ones(world, models, family, limit):
    """In bf16 some tokens of a random MoE go to other experts, so its gradients differ by more than rounding."""
    batch = invariance.make_batch()
    exact = invariance.reference_gradients(models[family], batch, dtype="float64", padded=False)
    args = invariance.make_args(models[family], train_device="cuda", micro_batch_size=12)
    ours = {n: g.cpu() for n, g in world.run(invariance.trainer_gradients, args, batch)[0].items()}
    assert invariance.of_whole(ours, exact) < limit


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_flash_attention_over_packed_rows_equals_attention_written_out(kv_heads, window):
    lengths, g = [5, 40, 1, 18], torch.Generator().manual_seed(0)
    shapes = [(1, heads, sum(lengths), 64) for heads in (4, kv_heads, kv_heads)]
    exact = [torch.randn(shape, generator=g).bfloat16().float().cuda().requires_grad_() for shape in shapes]
    low = [x.detach().bfloat16().requires_grad_() for x in exact]
    options = {"packed_layout": PackedLayout.whole(lengths), "sliding_window": window, "scaling": 0.1}
    ours, _ = packed_attention(torch.nn.Module(), *low, None, **options)
    theirs, _ = packed_attention(torch.nn.Module(), *exact, None, fused=False, **options)
    torch.testing.assert_close(ours.float(), theirs, rtol=0.02, atol=0.02)
    weight = torch.linspace(-1, 1, ours.numel(), device="cuda").view_as(ours)
    for a, b in zip(
        torch.autograd.grad((ours * weight).sum(), low),
        torch.autograd.grad((theirs * weight).sum(), exact),
        strict=True,
    ):
        assert (a.float() - b).norm() < 0.02 * b.norm()


def scores_beside(args, changed):
    """Log-probs of sample 0 packed with others; `changed` replaces the others' tokens."""
    backend, _ = jobs.make_backend(args)
    data = make_batch()
    if changed:
        data["tokens"][1:] = [[(t + 7) % 300 + 3 for t in row] for row in data["tokens"][1:]]
    shard = jobs.shard_of(backend, data)
    return backend.score(shard, "actor")[shard.columns["sample_indices"].index(0)]


def test_a_neighbour_in_the_row_changes_nothing(world, models):
    args = gpu_args(models["qwen3"], max_tokens_per_gpu=4096)
    one, other = (world.run(scores_beside, args, changed)[0] for changed in (False, True))
    assert torch.equal(one, other)


def train_with_naps(args, batches, sleeps):
    """Train, giving device memory back between batches; metrics, the shares of the trainer's state that each nap freed,
    and the weights."""
    backend, _ = jobs.make_backend(args, with_ref=True)
    metrics, freed = [], []
    for i, data in enumerate(batches):
        metrics.append(jobs.untimed(backend.train(jobs.shard_of(backend, data, i))))
        if sleeps:
            state = 3 * sum(local_bytes(p) for p in backend.actor.module.parameters())  # weights and two moments
            awake = torch.cuda.memory_allocated()
            backend.sleep()
            freed.append((awake - torch.cuda.memory_allocated()) / state)
            backend.wake()
    return metrics, freed, {name: t.cpu() for name, t in backend.iter_weights()}


def test_sleep_gives_memory_back_and_changes_nothing(world, models):
    args = gpu_args(models["qwen3"], use_kl_loss=True, kl_loss_coef=0.1)
    batches = [make_batch(seed) for seed in range(3)]
    plain, _, weights = world.run(train_with_naps, args, batches, False)[0]
    napped, freed, same = world.run(train_with_naps, args, batches, True)[0]
    assert all(share > 0.95 for share in freed), freed
    assert plain == napped
    assert all(torch.equal(t, same[n]) for n, t in weights.items())


@pytest.mark.parametrize(
    "fields",
    [
        {"fsdp_cpu_offload": True},
        {"gradient_checkpointing": True},
        {"attn_implementation": "eager"},
        {"by_layer": True},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_options_train_alike(world, models, fields):
    by_layer = fields.pop("by_layer", False)
    batches = [make_batch(0), make_batch(1)]
    plain = world.run(jobs.train, gpu_args(models["qwen3"]), batches)[0]["metrics"]
    other = world.run(jobs.train, gpu_args(models["qwen3"], **fields), batches, by_layer=by_layer)[0]["metrics"]
    for a, b in zip(plain, other, strict=True):
        assert a[0]["train/grad_norm"] == pytest.approx(b[0]["train/grad_norm"], rel=0.02)
        assert a[0]["rollout/log_probs"] == pytest.approx(b[0]["rollout/log_probs"], rel=0.005)


def test_resume_on_a_gpu_is_exact(world, models, tmp_path):
    batches = [make_batch(seed) for seed in range(4)]
    whole = world.run(jobs.train, gpu_args(models["qwen3"]), batches)[0]
    world.run(jobs.train_and_save, gpu_args(models["qwen3"]), batches[:2], str(tmp_path), 1)
    rest = world.run(jobs.train, gpu_args(models["qwen3"], load=str(tmp_path)), batches[2:])[0]
    assert rest["metrics"] == whole["metrics"][2:]
    assert all(torch.equal(t, rest["weights"][n]) for n, t in whole["weights"].items())


def test_weights_leave_in_the_dtype_of_the_checkpoint(world, models):
    weights = world.run(jobs.train, gpu_args(models["qwen3"]), [])[0]["weights"]
    from safetensors.torch import load_file

    saved = load_file(f"{models['qwen3']}/model.safetensors")
    assert all(torch.equal(t.cpu(), saved[n]) for n, t in weights.items())
