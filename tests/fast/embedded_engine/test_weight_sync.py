"""Weight updates on every path, what is refused, and that nothing stale survives."""

from __future__ import annotations

import base64
import os
import pickle
import threading

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save

from miles.backends.embedded_engine.payloads import FlattenedTensorMetadata, decode_tensors
from miles.backends.embedded_engine.weights import WeightError
from miles.backends.engine_api.errors import EngineRejected, EngineTimeout
from miles.utils.digest import tensor_digest
from miles.utils.process import reserve_port
from miles.utils.process_group import join_group, leave_group
from tests.fast.embedded_engine.conftest import make_request, make_scheduler, prompt, run
from tests.helpers.tiny_models import make_tiny_model

PAYLOAD = {
    "input_ids": prompt(80),
    "sampling_params": {"max_new_tokens": 6, "sampling_seed": 2},
    "return_logprob": True,
}


@pytest.fixture(scope="module")
def other_dir(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("other"), "qwen3", seed=9, initializer_range=0.15)


@pytest.fixture(scope="module")
def other(other_dir):
    return load_file(next(other_dir.glob("*.safetensors")))


@pytest.fixture(autouse=True)
def first_weights(server):
    """Each test starts from the directory's weights, version 0, with no session open."""
    server.call("update_weights_from_disk", str(server.model_path), weight_version=0)
    yield
    if server.call("server_info")["weight_update_open"]:
        server.call("end_weight_update")
    server.call("continue_")


def generate(server):
    answer = server.call("generate", PAYLOAD)
    return answer["output_ids"], answer["meta_info"]["output_token_logprobs"], answer["meta_info"]["weight_version"]


def expected_tokens(directory):
    """What the weights of a directory sample, computed in this process."""
    request = make_request(prompt(80), max_new_tokens=6, sampling_seed=2)
    run(make_scheduler(directory), request)
    return request.output_ids, request.output_logprobs


def assert_serves(server, directory, version):
    ids, logprobs, served = generate(server)
    want_ids, want_logprobs = expected_tokens(directory)
    assert (ids, [e[0] for e in logprobs], served) == (want_ids, want_logprobs, str(version))


def digests(tensors):
    return {name: tensor_digest(t) for name, t in tensors.items()}


# ---- from a group ----------------------------------------------------------------------------------------------------


class Group:
    """Rank 0 of a gloo group with the server as rank 1."""

    def __init__(self, server, name):
        self.server, self.name = server, name
        listener = reserve_port()
        port = listener.getsockname()[1]
        joining = threading.Thread(target=self._join, args=(listener, port))
        joining.start()
        server.call("init_weights_update_group", "127.0.0.1", port, 1, 2, name, "gloo")
        joining.join(20)

    def _join(self, listener, port):
        self.group = join_group("127.0.0.1", port, 0, 2, self.name, "gloo", 20.0, None, listener)

    def send(self, tensors, load_format, **changes):
        names = list(tensors)
        specs = {
            "names": names,
            "dtypes": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
            "shapes": [list(t.shape) for t in tensors.values()],
        } | changes
        failure = []

        def call():
            try:
                self.server.call(
                    "update_weights_from_distributed", specs["names"], specs["dtypes"], specs["shapes"], self.name, load_format=load_format
                )  # fmt: skip
            except Exception as error:
                failure.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        flat = [t.contiguous().view(-1).view(torch.uint8) for t in tensors.values()]
        for piece in [torch.cat(flat)] if load_format else [t.contiguous() for t in tensors.values()]:
            dist.broadcast(piece, src=0, group=self.group)
        thread.join(30)
        if failure:
            raise failure[0]

    def close(self):
        self.server.call("destroy_weights_update_group", self.name)
        leave_group(self.group)


@pytest.fixture
def group(server, request):
    made = Group(server, request.node.name)
    yield made
    made.close()


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
def test_from_a_group_in_two_buckets(server, group, other, other_dir, load_format):
    generate(server)  # fills the cache with the old weights' keys
    server.call("pause", "retract")
    server.call("flush")
    assert server.call("begin_weight_update")
    names = sorted(other)
    for part in (names[:7], names[7:]):
        group.send({n: other[n] for n in part}, load_format)
    server.call("end_weight_update")
    server.call("update_weight_version", 1)
    server.call("continue_")
    assert server.call("weights_checksums") == digests(other)
    assert_serves(server, other_dir, 1)


@pytest.mark.parametrize(
    "bad, word",
    [
        ({"model.norm.weight": torch.zeros(31)}, r"model.norm.weight: shape \(31,\), the model has \(32,\)"),
        (
            {"model.layers.7.input_layernorm.weight": torch.zeros(32)},
            "layers.7.input_layernorm.weight: the model has no such",
        ),
        ({"model.norm.weight": torch.zeros(32, dtype=torch.int32)}, "model.norm.weight: dtype int32"),
        ({"model.norm.weight": torch.full((32,), 0.1, dtype=torch.float64)}, "would be rounded to the served float32"),
    ],
)
def test_a_bad_tensor_refuses_the_whole_bucket_and_the_sender_is_not_left_waiting(server, group, bad, word):
    before = server.call("weights_checksums")
    server.call("begin_weight_update")
    good = {"lm_head.weight": torch.ones(320, 32)}
    with pytest.raises(EngineRejected, match=word):
        group.send(good | bad, "flattened_bucket")
    assert server.call("weights_checksums") == before
    group.send(good, "flattened_bucket")  # the group still works
    assert server.call("weights_checksums") != before


def test_a_lossless_cast_is_taken(server, group):
    server.call("begin_weight_update")
    value = torch.arange(32).to(torch.bfloat16)
    group.send({"model.norm.weight": value}, None)
    assert server.call("weights_checksums")["model.norm.weight"] == tensor_digest(value.float())


def test_a_group_that_never_forms_is_an_error_and_its_name_stays_free(server):
    with reserve_port() as nobody, pytest.raises(EngineRejected, match="could not reach rank 0's store within 6 s"):
        server.call("init_weights_update_group", "127.0.0.1", nobody.getsockname()[1] ^ 1, 1, 2, "lonely", "gloo")
    with pytest.raises(EngineRejected, match="no weight update group 'lonely'"):
        server.call("destroy_weights_update_group", "lonely")


# ---- sessions, versions, in flight -----------------------------------------------------------------------------------


def test_tensors_outside_a_session_are_refused(server, other):
    body = base64.b64encode(save(other)).decode()
    with pytest.raises(EngineRejected, match="begin_weight_update"):
        server.call("update_weights_from_tensor", [body])
    server.call("begin_weight_update")
    with pytest.raises(EngineRejected, match="already open"):
        server.call("begin_weight_update")
    server.call("end_weight_update")
    with pytest.raises(EngineRejected, match="no weight update is open"):
        server.call("end_weight_update")


def test_nothing_is_sampled_between_begin_and_end(server):
    """Half-updated weights never sample a token, paused or not."""
    server.call("begin_weight_update")
    done = threading.Event()
    thread = threading.Thread(target=lambda: (server.call("generate", PAYLOAD), done.set()))
    thread.start()
    assert not done.wait(0.5)
    server.call("health")
    server.call("end_weight_update")
    assert done.wait(20)


def test_an_unpaused_update_waits_for_requests_in_flight(server, other_dir):
    payload = {
        "input_ids": prompt(9),
        "sampling_params": {"max_new_tokens": 600, "ignore_eos": True, "sampling_seed": 1},
    }
    answers = []
    thread = threading.Thread(target=lambda: answers.append(server.call("generate", payload)))
    thread.start()
    while not server.call("server_info")["internal_states"][0]["num_running_reqs"]:
        pass
    server.call("update_weights_from_disk", str(other_dir), weight_version=1)
    thread.join(20)
    spans = answers[0]["meta_info"]["weight_versions"]
    assert spans == [{"version": "0", "start": 0, "end": 600}]
    assert_serves(server, other_dir, 1)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_tokens_on_both_sides_of_a_paused_update_are_told_apart(server, other_dir, mode):
    payload = {
        "input_ids": prompt(9),
        "sampling_params": {"max_new_tokens": 900, "ignore_eos": True, "sampling_seed": 1},
    }
    answers = []
    thread = threading.Thread(target=lambda: answers.append(server.call("generate", payload)))
    thread.start()
    while not server.call("server_info")["internal_states"][0]["num_running_reqs"]:
        pass
    server.call("pause", mode)
    server.call("update_weights_from_disk", str(other_dir), weight_version=1)
    server.call("continue_")
    thread.join(20)
    first, second = answers[0]["meta_info"]["weight_versions"]
    assert first["version"] == "0" and second["version"] == "1"
    assert (first["start"], first["end"], second["end"]) == (0, second["start"], 900) and first["end"] > 0


def test_a_version_may_abort_what_is_in_flight(server):
    thread_answers = []
    payload = {"input_ids": prompt(9), "sampling_params": {"max_new_tokens": 1800, "ignore_eos": True}}
    thread = threading.Thread(target=lambda: thread_answers.append(server.call("generate", payload)))
    thread.start()
    while not server.call("server_info")["internal_states"][0]["num_running_reqs"]:
        pass
    server.call("update_weight_version", 5, abort_all_requests=True)
    thread.join(20)
    assert thread_answers[0]["meta_info"]["finish_reason"]["type"] == "abort"
    assert server.call("model_info")["weight_version"] == "5"


# ---- from tensors and from disk --------------------------------------------------------------------------------------


def pickled(content) -> str:
    """A pickle in which the metadata class has the module path that SGLang's sender gives it."""
    own, sglang = FlattenedTensorMetadata.__module__, "sglang.srt.weight_sync.tensor_bucket"
    data = pickle.dumps(content, protocol=3)  # protocol 3 spells module paths as plain lines
    return base64.b64encode(data.replace(f"c{own}\n".encode(), f"c{sglang}\n".encode())).decode()


def payloads(other):
    flat = torch.cat([t.contiguous().view(-1).view(torch.uint8) for t in other.values()])
    entries, start = [], 0
    for name, t in other.items():
        nbytes = t.numel() * t.element_size()
        entries.append(FlattenedTensorMetadata(name, t.shape, t.dtype, start, start + nbytes, nbytes))
        start += nbytes
    return {
        "safetensors": (base64.b64encode(save(other)).decode(), None),
        "pickle": (pickled(list(other.items())), None),
        "bucket": (pickled({"flattened_tensor": flat, "metadata": entries}), "flattened_bucket"),
    }


@pytest.mark.parametrize("kind", ["safetensors", "pickle", "bucket"])
def test_from_tensors(server, other, other_dir, kind):
    body, load_format = payloads(other)[kind]
    server.call("begin_weight_update")
    server.call("update_weights_from_tensor", [body], load_format=load_format)
    server.call("end_weight_update")
    server.call("update_weight_version", 2)
    assert server.call("weights_checksums") == digests(other)
    assert_serves(server, other_dir, 2)


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/must-not-exist",)


@pytest.mark.parametrize(
    "payload, word",
    [
        (base64.b64encode(pickle.dumps(Evil())).decode(), "not on the list"),
        ("%%%", "not base64"),
        (base64.b64encode(b"junk").decode(), "neither a pickle nor safetensors"),
        (base64.b64encode(pickle.dumps([1, 2])).decode(), "neither .name, tensor. pairs"),
    ],
)
def test_payloads_that_are_no_tensors(payload, word):
    with pytest.raises(WeightError, match=word):
        decode_tensors(payload, None, torch.device("cpu"))


def test_from_a_directory_that_does_not_fit(server, tmp_path):
    before = server.call("weights_checksums")
    wide = make_tiny_model(tmp_path / "wide", "qwen3", hidden_size=64)
    with pytest.raises(EngineRejected, match="does not fit"):
        server.call("update_weights_from_disk", str(wide))
    with pytest.raises(EngineRejected, match=r"no \*.safetensors"):
        server.call("update_weights_from_disk", str(tmp_path / "absent"))
    assert server.call("weights_checksums") == before


# ---- checker and memory ----------------------------------------------------------------------------------------------


def test_the_checker_sees_noise_and_restoration(server):
    before = server.call("weights_checksums")
    server.call("weights_checker", "snapshot")
    server.call("weights_checker", "compare")
    server.call("weights_checker", "reset_tensors", skip_tensor_list=["norm"])
    after = server.call("weights_checksums")
    assert {n for n in before if before[n] == after[n]} == {n for n in before if "norm" in n}
    with pytest.raises(EngineRejected, match=r"tensors differ from the snapshot: .*q_proj"):
        server.call("weights_checker", "compare")
    server.call("update_weights_from_disk", str(server.model_path))
    server.call("weights_checker", "compare")
    with pytest.raises(EngineRejected, match="unknown action 'sing'"):
        server.call("weights_checker", "sing")


def test_released_weights_generate_nothing_until_all_are_back(server, other, other_dir):
    server.call("release_memory", ["weights", "kv_cache"])
    assert server.call("server_info")["released_tags"] == ["kv_cache", "weights"]
    with pytest.raises(EngineRejected, match="memory is released"):
        server.call("generate", PAYLOAD)
    with pytest.raises(EngineRejected, match="already released: weights"):
        server.call("release_memory", ["weights"])
    server.call("resume_memory", ["weights"])
    server.call("resume_memory", ["kv_cache"])
    server.call("begin_weight_update")
    part = {n: t for n, t in other.items() if n != "model.norm.weight"}
    server.call("update_weights_from_tensor", [base64.b64encode(save(part)).decode()])
    server.call("end_weight_update")
    with pytest.raises(EngineRejected, match=r"1 weights have no content.*model.norm.weight"):
        server.call("generate", PAYLOAD)
    server.call("begin_weight_update")
    server.call("update_weights_from_tensor", [base64.b64encode(save(other)).decode()])
    server.call("end_weight_update")
    server.call("update_weight_version", 3)
    assert_serves(server, other_dir, 3)
    with pytest.raises(EngineRejected, match="not released: weights"):
        server.call("resume_memory", ["weights"])


def test_an_update_whose_caller_gave_up_does_not_happen_later(server):
    """It would open a session that nobody closes, and the engine would never generate again."""
    payload = {"input_ids": prompt(9), "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True}}
    thread = threading.Thread(target=lambda: server.call("generate", payload))
    thread.start()
    while not server.call("server_info")["internal_states"][0]["num_running_reqs"]:
        pass
    with pytest.raises(EngineTimeout):
        server.call("begin_weight_update", timeout_s=0.2)
    thread.join(30)
    server.call("generate", PAYLOAD)
    assert not server.call("server_info")["weight_update_open"]


def test_a_sender_that_leaves_in_mid_transfer_is_an_error(server, group):
    server.call("begin_weight_update")
    failure = []

    def call():
        try:
            server.call("update_weights_from_distributed", ["model.norm.weight"], ["float32"], [[32]], group.name)
        except EngineRejected as error:
            failure.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    leave_group(group.group, abort=True)
    thread.join(30)
    assert "transfer over group" in failure[0] and "failed" in failure[0]
    group.close = lambda: None  # both sides have left
