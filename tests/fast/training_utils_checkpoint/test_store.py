import errno
import json
import shutil

import pytest

from miles.backends.training_utils.checkpoint import (
    TRACKER,
    CheckpointError,
    CheckpointStore,
    disk_error,
    read_resume_state,
    resolve_load,
)


def save(root, rollout_id, text="weights", **driver_state):
    store = CheckpointStore(root)
    folder = store.begin(rollout_id)
    (folder / "fsdp").mkdir()
    (folder / "fsdp" / "part").write_text(text)
    return store.commit(rollout_id, driver_state)


def test_what_was_committed_is_the_latest_and_keeps_the_driver_state(tmp_path):
    save(tmp_path, 3, weight_version=4)
    save(tmp_path, 7, weight_version=8, tracker={"wandb": "abc"})
    store = CheckpointStore(tmp_path)
    assert store.latest() == 7
    assert store.iterations() == [3, 7]
    assert store.read_driver_state(7) == {"rollout_id": 7, "weight_version": 8, "tracker": {"wandb": "abc"}}
    assert (tmp_path / TRACKER).read_text() == "7\n"
    assert (store.verify(3) / "fsdp" / "part").read_text() == "weights"


def test_a_checkpoint_begun_but_not_committed_does_not_count(tmp_path):
    save(tmp_path, 1)
    CheckpointStore(tmp_path).begin(2)
    assert CheckpointStore(tmp_path).latest() == 1
    assert CheckpointStore(tmp_path).iterations() == [1]


def test_the_next_save_removes_what_a_dead_one_left(tmp_path):
    (CheckpointStore(tmp_path).begin(1) / "junk").write_text("x")
    save(tmp_path, 2)
    assert not list(tmp_path.glob(".iter_*"))


def test_a_discarded_save_leaves_nothing(tmp_path):
    store = CheckpointStore(tmp_path)
    store.begin(1)
    store.discard(1)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_and_a_cut_file_are_both_named(tmp_path):
    save(tmp_path, 0)
    folder = save(tmp_path, 1)
    (folder / "fsdp" / "part").write_text("weig")
    (folder / "driver.json").unlink()
    with pytest.raises(CheckpointError, match=r"driver.json is missing.*part has 4 bytes instead of 7.*\[0\]"):
        CheckpointStore(tmp_path).verify(1)


def test_a_folder_without_manifest_is_not_complete(tmp_path):
    (tmp_path / "iter_0000004").mkdir()
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        CheckpointStore(tmp_path).verify(4)


def test_an_id_that_is_not_there_is_answered_with_those_that_are(tmp_path):
    save(tmp_path, 5)
    with pytest.raises(CheckpointError, match=r"no checkpoint 6 in .*\[5\]"):
        resolve_load(tmp_path, 6)


def test_a_tracker_that_is_no_number_is_refused(tmp_path):
    save(tmp_path, 5)
    (tmp_path / TRACKER).write_text("release")
    with pytest.raises(CheckpointError, match=r"'release', not a number.*\[5\]"):
        resolve_load(tmp_path)


def test_a_lost_tracker_beside_several_checkpoints_is_no_fresh_start(tmp_path):
    save(tmp_path, 5)
    save(tmp_path, 6)
    (tmp_path / TRACKER).unlink()
    with pytest.raises(CheckpointError, match=r"\[5, 6\] but no latest_checkpointed_iteration.txt.*--ckpt-step"):
        resolve_load(tmp_path)
    assert resolve_load(tmp_path, 5)[1] == 5


def test_driver_state_of_another_rollout_is_refused(tmp_path):
    folder = save(tmp_path, 5)
    shutil.copytree(folder, tmp_path / "iter_0000006")
    with pytest.raises(CheckpointError, match="belongs to rollout 5, not 6"):
        CheckpointStore(tmp_path).read_driver_state(6)


@pytest.mark.parametrize("load", [None, "absent", "empty"])
def test_nothing_to_resume_from_is_a_fresh_run(tmp_path, load):
    (tmp_path / "empty").mkdir()
    assert resolve_load(None if load is None else tmp_path / load) is None
    assert read_resume_state(None if load is None else tmp_path / load) is None


def test_load_may_name_one_iteration(tmp_path):
    save(tmp_path, 5, weight_version=6)
    folder = save(tmp_path, 6, weight_version=7).with_name("iter_0000005")
    assert resolve_load(folder)[1] == 5
    assert read_resume_state(folder)["weight_version"] == 6
    with pytest.raises(CheckpointError, match="is checkpoint 5, --ckpt-step asks for 6"):
        resolve_load(folder, 6)


def test_a_save_that_died_while_replacing_its_own_id_is_undone(tmp_path):
    folder = save(tmp_path, 5)
    folder.rename(tmp_path / ".iter_0000005.replaced")  # as the replacing save leaves it for a moment
    assert resolve_load(tmp_path)[1] == 5


def test_commit_without_begin_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="was not begun"):
        CheckpointStore(tmp_path).commit(1)


def test_a_full_disk_says_how_much_room_there_is(tmp_path):
    error = disk_error(OSError(errno.ENOSPC, "No space left on device"), tmp_path / "a" / "b")
    assert "No space left on device" in str(error) and "GB are free" in str(error) and "--save" in str(error)


def test_an_unwritable_save_directory_is_an_error_that_names_it(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file"):
        CheckpointStore(tmp_path / "file").begin(0)


def test_the_manifest_lists_every_file(tmp_path):
    folder = save(tmp_path, 1)
    assert json.loads((folder / "manifest.json").read_text()).keys() == {"driver.json", "fsdp/part"}
