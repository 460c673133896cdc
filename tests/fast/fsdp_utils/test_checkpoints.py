"""Resume is exact, and what cannot be resumed is refused with the reason."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from miles.backends.training_utils.checkpoint import CheckpointError, CheckpointStore
from miles.backends.training_utils.model_identity import check_before_loading
from tests.fast.fsdp_utils import jobs
from tests.fast.fsdp_utils.jobs import make_args, make_batch

BATCHES = [make_batch(seed) for seed in range(4)]


@pytest.fixture(scope="module")
def saved(world, models, tmp_path_factory):
    """A checkpoint of qwen3 after two rollouts (ids 0 and 1), with a cosine schedule."""
    root = str(tmp_path_factory.mktemp("saved"))
    world.run(jobs.train_and_save, args_of(models), BATCHES[:2], root, 1)
    return root


def args_of(models, **fields):
    schedule = {"lr_decay_style": "cosine", "lr_decay_iters": 20, "lr_warmup_iters": 2, "lr": 3e-3}
    return make_args(models["qwen3"], **schedule | fields)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_four_rollouts_equal_two_resume_and_two_bit_for_bit(world, models, tmp_path, family):
    fields = {"global_batch_size": 4, "use_kl_loss": True, "kl_loss_coef": 0.1, "ref_update_interval": 2}
    args = make_args(models[family], **fields)
    whole = world.run(jobs.train, args, BATCHES, with_ref=True)[0]
    world.run(jobs.train_and_save, args, BATCHES[:2], str(tmp_path), 1, with_ref=True)
    args.load = str(tmp_path)
    rest = world.run(jobs.train, args, BATCHES[2:], with_ref=True)[0]
    assert rest["start"] == 2
    assert rest["metrics"] == whole["metrics"][2:]
    assert all(torch.equal(t, rest["weights"][n]) for n, t in whole["weights"].items())


def test_models_sharded_by_layer_load_what_one_group_saved(world, models, saved):
    one = world.run(jobs.train, args_of(models, load=saved), [])[0]
    layered = world.run(jobs.train, args_of(models, load=saved), [], by_layer=True)[0]
    assert all(torch.equal(t, layered["weights"][n]) for n, t in one["weights"].items())


def test_another_number_of_ranks_continues_with_the_same_model(world, solo, models, saved):
    two = world.run(jobs.train, args_of(models, load=saved), BATCHES[2:3])[0]
    one = solo.run(jobs.train, args_of(models, load=saved), BATCHES[2:3])[0]
    assert one["start"] == two["start"] == 2
    a, b = one["metrics"][0][0], two["metrics"][0][0]
    assert all(a[k] == pytest.approx(b[k], rel=1e-4, abs=1e-6) for k in a)


def generators(args):
    jobs.make_backend(args)
    import random

    import numpy as np

    return torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()


def spoil_generators_and_save(args, root):
    """Every rank's generators elsewhere than any seed would put them; returns what each draws next."""
    import random

    import numpy as np

    backend, _ = jobs.make_backend(args)
    torch.manual_seed(100 + backend.rank)
    np.random.seed(200 + backend.rank)
    random.seed(300 + backend.rank)
    jobs.save(backend, root, 0)
    return torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()


def test_the_generators_of_every_rank_continue_where_they_were(world, solo, models, tmp_path):
    expected = world.run(spoil_generators_and_save, args_of(models), str(tmp_path))
    assert expected[0] != expected[1]
    assert world.run(generators, args_of(models, load=str(tmp_path))) == expected
    assert world.run(generators, args_of(models, load=str(tmp_path), no_load_rng=True)) != expected
    # One rank cannot have the states of two: it starts from a seed of its own, the same each time.
    alone = solo.run(generators, args_of(models, load=str(tmp_path)))
    assert alone == solo.run(generators, args_of(models, load=str(tmp_path))) and alone[0] not in expected


def inside(args):
    """Start id, optimizer steps taken, learning rate, and whether the optimizer has moments."""
    backend, start = jobs.make_backend(args)
    return start, backend.schedule.num_steps, backend.optimizer.param_groups[0]["lr"], bool(backend.optimizer.state)


def test_flags_choose_what_is_resumed(world, models, saved):
    full = world.run(inside, args_of(models, load=saved))[0]
    assert full[:2] == (2, 2) and full[3]
    assert world.run(inside, args_of(models, load=saved, no_load_optim=True))[0] == (*full[:3], False)
    start, steps, lr, moments = world.run(inside, args_of(models, load=saved, finetune=True))[0]
    assert (start, steps, lr, moments) == (0, 0, 0.0, False)
    fresh = world.run(jobs.train, args_of(models), [])[0]["weights"]
    tuned = world.run(jobs.train, args_of(models, load=saved, finetune=True), [])[0]["weights"]
    assert not torch.equal(fresh["model.norm.weight"], tuned["model.norm.weight"])


def test_the_schedule_is_the_checkpoints_unless_overridden(world, models, saved):
    kept = world.run(inside, args_of(models, load=saved, lr=9e-3))[0]
    changed = world.run(inside, args_of(models, load=saved, lr=9e-3, override_lr_scheduler=True))[0]
    assert kept[1] == changed[1] == 2
    assert changed[2] == pytest.approx(3 * kept[2])
    with pytest.raises(ValueError, match=r"max_lr is 0\.009 and was 0\.003.*--override"):
        world.run(inside, args_of(models, load=saved, lr=9e-3, use_checkpoint_lr_scheduler=False))


def test_a_checkpoint_without_optimizer_says_how_to_load_it(world, models, tmp_path):
    world.run(jobs.train_and_save, args_of(models, no_save_optim=True), BATCHES[:1], str(tmp_path), 0)
    with pytest.raises(CheckpointError, match=r"no optimizer state.*--no-load-optim goes on"):
        world.run(inside, args_of(models, load=str(tmp_path)))
    assert world.run(inside, args_of(models, load=str(tmp_path), no_load_optim=True))[0][0] == 1


def test_load_takes_an_iteration_a_step_or_a_hugging_face_directory(world, models, saved, tmp_path):
    shutil.copytree(saved, tmp_path / "two")
    shutil.copytree(Path(saved) / "iter_0000001", tmp_path / "two" / "iter_0000003")
    (tmp_path / "two" / "latest_checkpointed_iteration.txt").write_text("3\n")
    (tmp_path / "two" / "iter_0000003" / "driver.json").write_text('{"rollout_id": 3}')
    manifest = tmp_path / "two" / "iter_0000003" / "manifest.json"
    sizes = json.loads(manifest.read_text()) | {"driver.json": len('{"rollout_id": 3}')}
    manifest.write_text(json.dumps(sizes))
    assert world.run(inside, args_of(models, load=str(tmp_path / "two")))[0][0] == 4
    assert world.run(inside, args_of(models, load=str(tmp_path / "two"), ckpt_step=1))[0][0] == 2
    assert world.run(inside, args_of(models, load=str(tmp_path / "two" / "iter_0000001")))[0][0] == 2
    assert world.run(inside, args_of(models, load=models["qwen3"]))[0][:2] == (0, 0)
    assert world.run(inside, args_of(models, load=str(tmp_path / "not yet there")))[0][:2] == (0, 0)


def test_a_fresh_run_starts_from_the_reference_weights(world, models, saved, tmp_path):
    import transformers
    from safetensors.torch import load_file

    model = transformers.AutoModelForCausalLM.from_pretrained(models["qwen3"])
    model.model.norm.weight.data.fill_(1.5)
    model.save_pretrained(tmp_path)
    weights = world.run(jobs.train, args_of(models, ref_load=str(tmp_path)), [])[0]["weights"]
    assert all(torch.equal(t, weights[n]) for n, t in load_file(tmp_path / "model.safetensors").items())


def test_the_checkpoint_of_another_model_is_refused_with_the_differences(world, models, saved):
    with pytest.raises(CheckpointError) as refused:
        world.run(inside, make_args(models["llama"], load=saved))
    text = str(refused.value)
    assert "another model" in text and "model_type is llama here and qwen3 in the checkpoint" in text
    assert "it has model.layers.0.self_attn.k_norm.weight, which this model lacks" in text


def test_a_wider_model_is_told_by_its_shapes(world, saved, tmp_path):
    from tests.helpers.tiny_models import make_tiny_model

    wide = str(make_tiny_model(tmp_path, "qwen3", intermediate_size=96))
    with pytest.raises(
        CheckpointError, match=r"intermediate_size is 96 here and 64.*shape \[64, 32\] instead of \[96, 32\]"
    ):
        world.run(inside, make_args(wide, load=saved))


def test_files_alone_tell_a_checkpoint_of_this_model_from_one_of_another(world, models, tmp_path):
    for family, directory in models.items():
        world.run(jobs.train_and_save, make_args(directory), [], str(tmp_path / family), 0)
        checkpoint = CheckpointStore(tmp_path / family).verify(0)
        for other, other_directory in models.items():
            if other == family:
                check_before_loading(checkpoint, other_directory)
                continue
            with pytest.raises(CheckpointError, match="another model") as refused:
                check_before_loading(checkpoint, other_directory)
            assert f"--hf-checkpoint {other_directory}" in str(refused.value) and directory in str(refused.value)


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_checkpoint_is_refused_and_never_taken_for_a_fresh_start(world, models, saved, tmp_path, damage):
    shutil.copytree(saved, tmp_path / "copy")
    part = next((tmp_path / "copy").rglob("*.distcp"))
    part.unlink() if damage == "gone" else os.truncate(part, part.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=rf"{part.name} (is missing|has \d+ bytes instead of)"):
        world.run(inside, args_of(models, load=str(tmp_path / "copy")))


def save_on_full_disk(args, root, full_rank):
    """Save where rank `full_rank` can write no more than 1 kB to a file. Returns the error."""
    backend, _ = jobs.make_backend(args)
    backend.train(jobs.shard_of(backend, BATCHES[2], 2))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if backend.rank == full_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    try:
        jobs.save(backend, root, 2)
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return None


@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_fills_up_fails_on_every_rank_and_keeps_the_previous_checkpoint(
    world, models, saved, tmp_path, rank
):
    shutil.copytree(saved, tmp_path / "copy")
    errors = world.run(save_on_full_disk, args_of(models, load=str(tmp_path / "copy")), str(tmp_path / "copy"), rank)
    assert all(error is not None and f"rank {rank}: " in error and "GB are free there" in error for error in errors)
    store = CheckpointStore(tmp_path / "copy")
    assert store.latest() == 1 and store.iterations() == [1]
    assert world.run(inside, args_of(models, load=str(tmp_path / "copy")))[0][0] == 2


def save_without_room(args, root):
    backend, _ = jobs.make_backend(args)
    usage = shutil.disk_usage(root)
    original, shutil.disk_usage = shutil.disk_usage, lambda path: usage._replace(free=1000)
    try:
        jobs.save(backend, root, 0)
    except CheckpointError as error:
        return str(error)
    finally:
        shutil.disk_usage = original
    return None


def test_too_little_room_is_noticed_before_anything_is_written(world, models, tmp_path):
    for error in world.run(save_without_room, args_of(models), str(tmp_path)):
        assert "a checkpoint needs 0.00 GB" in error and "has 0.00 GB free" in error
    assert not list(tmp_path.rglob("*.distcp"))


_KILLED = """
import os, signal, sys, tempfile
import torch, torch.distributed as dist
from pathlib import Path
from tests.fast.fsdp_utils import jobs

model, root, doomed = sys.argv[1], sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", store=dist.FileStore(tempfile.mktemp(), 1), rank=0, world_size=1)
backend, start = jobs.make_backend(jobs.make_args(model, load=root))
backend.train(jobs.shard_of(backend, jobs.make_batch(2), start))

def die(event, args):
    if event == "open" and isinstance(args[0], (str, bytes, os.PathLike)) and doomed in os.fspath(args[0]):
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(die)
jobs.save(backend, root, start)
"""


@pytest.mark.parametrize("doomed", [".metadata", "manifest.json"])
def test_a_trainer_killed_in_mid_save_resumes_from_the_checkpoint_before(world, models, saved, tmp_path, doomed):
    """SIGKILL right before the named file is written, in a process that saves a real model and optimizer."""
    shutil.copytree(saved, tmp_path / "copy")
    repo = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-c", _KILLED, models["qwen3"], str(tmp_path / "copy"), doomed]
    done = subprocess.run(command, cwd=repo, capture_output=True, text=True, timeout=100)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert world.run(inside, args_of(models, load=str(tmp_path / "copy")))[0][0] == 2
