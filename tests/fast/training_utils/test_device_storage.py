"""Storages emptied and filled again under tensors that stay."""

import torch

from miles.backends.training_utils.device_storage import DeviceStorage


def test_contents_and_views_survive_and_the_memory_is_gone_meanwhile():
    storage = DeviceStorage(torch.device("cpu"))
    whole = torch.arange(12.0)
    part, other = whole[4:8].view(2, 2), torch.arange(5, dtype=torch.int64)
    kept = whole.clone(), other.clone()
    for _ in range(2):
        storage.release([whole, part])
        storage.release([other, whole])  # what is released already is left alone
        assert storage.nbytes == 12 * 4 + 5 * 8
        assert whole.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
        storage.restore()
        assert torch.equal(whole, kept[0]) and torch.equal(other, kept[1])
        part[0, 0] = -1
        assert whole[4] == -1, "a view still is one"
        whole[4] = 4
    assert storage.nbytes == 0
    storage.restore()


def test_tensors_on_other_devices_are_left_alone():
    storage = DeviceStorage(torch.device("meta"))
    here = torch.ones(3)
    storage.release([here])
    assert here.sum() == 3 and storage.nbytes == 0
