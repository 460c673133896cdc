"""Between Hugging Face directories and torch_dist: the same tensors, whatever the ranks that convert and train."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from miles.backends.training_utils.checkpoint import CheckpointError
from tests.fast.megatron_utils import jobs
from tests.fast.megatron_utils.architectures import make_model
from tests.fast.megatron_utils.jobs import PP, TP
from tests.fast.megatron_utils.test_training import make_args


def there(directory, save):
    from pathlib import Path

    from miles.backends.megatron_utils.conversion import to_torch_dist

    to_torch_dist(Path(directory), Path(save))


def back(checkpoint, origin, target):
    from pathlib import Path

    from miles.backends.megatron_utils.conversion import to_hf

    to_hf(Path(checkpoint), Path(origin), Path(target))


def weights(args):
    backend, start = jobs.make_backend(args)
    return start, jobs.weights_of(backend)


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen2"])
def test_there_and_back_over_four_stages(quad, tmp_path, name):
    make_model(tmp_path / "model", name)
    file = tmp_path / "model" / "model.safetensors"
    mixed = {n: t if "correction_bias" in n else t.bfloat16() for n, t in load_file(file).items()}
    save_file(mixed, file)
    quad.run(there, str(tmp_path / "model"), str(tmp_path / "dist"))
    quad.run(back, str(tmp_path / "dist" / "iter_0000000"), str(tmp_path / "model"), str(tmp_path / "out"))
    found = {}
    for part in (tmp_path / "out").glob("*.safetensors"):
        found |= load_file(part)
    assert found.keys() == mixed.keys()
    for tensor_name, tensor in mixed.items():
        assert found[tensor_name].dtype == tensor.dtype and torch.equal(found[tensor_name], tensor)


def test_a_run_starts_from_a_conversion_in_its_own_layout(quad, models, tmp_path):
    changed = tmp_path / "changed"
    changed.mkdir()
    for file in jobs.Path(models["qwen3_deep"]).iterdir():
        (changed / file.name).write_bytes(file.read_bytes())
    tensors = {name: tensor + 1 for name, tensor in load_file(changed / "model.safetensors").items()}
    save_file(tensors, changed / "model.safetensors")
    quad.run(there, str(changed), str(tmp_path / "dist"))
    args = make_args(models["qwen3_deep"], load=str(tmp_path / "dist"), finetune=True, **{TP: 2})
    for start, found in quad.run(weights, args):
        assert start == 0 and found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    args = make_args(models["qwen3_deep"], load=str(tmp_path / "dist"), no_load_optim=True, **{PP: 4})
    with pytest.raises(
        CheckpointError, match="weights alone, as a conversion writes them: --finetune starts from them"
    ):
        quad.run(weights, args)
