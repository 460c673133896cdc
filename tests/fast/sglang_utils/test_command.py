"""Every flag reaches the server under the name that its version has, and none that it lacks is dropped in silence."""

from __future__ import annotations

import pytest

from miles.backends.sglang_utils.command import (
    UnknownOption,
    given_options,
    server_environment,
    server_options,
    unknown_options,
)
from miles.backends.sglang_utils.installation import SglangMissing, installed
from miles.backends.sglang_utils.launch import launch
from tests.fast.sglang_utils.conftest import flags, make_installation

OWN = {"model_path": "/m", "port": 30000}


def words(installation, **fields) -> list[str]:
    return server_options(flags(**fields), installation, OWN)


def test_values_switches_and_lists(installation):
    found = words(
        installation,
        sglang_watchdog_timeout=-1.5,
        sglang_disable_radix_cache=True,
        sglang_ple_offload_embedding=False,
        sglang_lora_paths=["a=/x", "b=/y"],
    )
    assert "--watchdog-timeout=-1.5" in found, "one word: a negative value is no option"
    assert "--disable-radix-cache" in found
    assert "--no-ple-offload-embedding" in found
    assert found[found.index("--lora-paths") :][:3] == ["--lora-paths", "a=/x", "b=/y"]


def test_an_older_version_gets_its_own_name_for_an_option(installation):
    assert "--cuda-graph-max-bs=32" in words(installation, sglang_cuda_graph_max_bs_decode=32)


def test_what_this_version_lacks_is_refused_all_at_once(installation):
    with pytest.raises(UnknownOption) as error:
        words(installation, sglang_enable_metrics=True, sglang_kv_cache_dtype="auto", sglang_attention_backend="triton")
    for part in (
        "--sglang-enable-metrics is no option",
        "--sglang-kv-cache-dtype",
        "SGLang 0.5.99",
        "torch_native, fa3",
    ):
        assert part in str(error.value)


def test_an_option_that_only_the_installed_version_has_is_passed_on(installation):
    assert unknown_options(flags(sglang_tp_size=1, sglang_host="::1"), installation) == []


def test_flags_of_ours_that_look_like_the_servers_stay_here(installation):
    args = flags(sglang_config="topology.yaml", sglang_lora_use_virtual_experts=True, sglang_python="/p")
    assert given_options(args, installation) == {}


def test_the_run_decides_over_the_user_and_the_user_over_defaults(installation):
    found = server_options(
        flags(train_device="cpu", sglang_port=1, sglang_attention_backend="fa3"), installation, OWN | {"host": "h"}
    )
    assert "--port=30000" in found and "--port=1" not in found
    assert "--attention-backend=fa3" in found and "--device=cpu" in found
    assert not any(word.startswith("--sampling-backend") for word in found), "a default that it lacks is left out"


def test_an_option_that_a_run_needs_and_it_lacks_is_named(installation):
    with pytest.raises(UnknownOption, match="nccl_port"):
        server_options(flags(), installation, {"nccl_port": 1})


def test_ranks_on_a_cpu_get_a_core_each_and_no_package_of_another_interpreter(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/here")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {4, 5})
    env = server_environment(flags(train_device="cpu", sglang_python="/opt/other/python"), None, ranks=3)
    assert env["SGLANG_CPU_OMP_THREADS_BIND"] == "4|5|4" and env["SGLANG_USE_CPU_ENGINE"] == "1"
    assert "PYTHONPATH" not in env
    on_gpu = server_environment(flags(train_device="cuda"), [2, 3], ranks=2)
    assert on_gpu["PYTHONPATH"] == "/here", "SGLang of this interpreter is found where it is"
    assert on_gpu["CUDA_VISIBLE_DEVICES"] == "2,3" and "SGLANG_USE_CPU_ENGINE" not in on_gpu


# ---- whole command lines ---------------------------------------------------------------------------------------------------


class Launched(Exception):
    """Stands for the start of a server: what it would have been started with."""


@pytest.fixture
def command_of(monkeypatch, tmp_path):
    """The command line, environment and number of held ports of a launch."""
    switches = ("enable_memory_saver", "enable_dp_attention", "trust_remote_code", "enable_return_routed_experts")
    values = [
        *("nccl_port", "dist_init_addr", "nnodes", "node_rank", "disaggregation_mode", "disaggregation_bootstrap_port"),
        *("admin_api_key", "weight_version", "random_seed", "pp_size", "dp_size", "ep_size", "mem_fraction_static"),
        *("speculative_algorithm", "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens"),
    ]
    known = {f"--{n.replace('_', '-')}": (n, 0, None) for n in switches}
    known |= {f"--{n.replace('_', '-')}": (n, 1, None) for n in values}
    monkeypatch.setattr("miles.backends.sglang_utils.launch.installed", lambda python: make_installation(**known))

    def spawn(command, *, log_path, env, pass_fds):
        raise Launched(command, env, pass_fds)

    monkeypatch.setattr("miles.backends.sglang_utils.launch.spawn", spawn)

    def launch_of(gpu_ids=None, **fields):
        with pytest.raises(Launched) as stopped:
            launch(
                flags(train_device="cuda", rollout_seed=10, **fields), index=3, host="127.0.0.1", port=0, admin_key="k",
                model_path="/m", log_path=tmp_path / "log", weight_version=7, gpu_ids=gpu_ids,
            )  # fmt: skip
        command, env, fds = stopped.value.args
        return dict(w.removeprefix("--").partition("=")[::2] for w in command if w.startswith("--")), env, fds

    return launch_of


def test_tensor_data_and_expert_parallel_ranks_of_one_node(command_of):
    found, env, fds = command_of(
        gpu_ids=[4, 5, 6, 7], rollout_num_gpus_per_engine=4, sglang_dp_size=4, sglang_ep_size=4, sglang_enable_dp_attention=True
    )  # fmt: skip
    assert (found["tp-size"], found["dp-size"], found["ep-size"]) == ("4", "4", "4")
    assert "enable-dp-attention" in found and env["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"
    assert (found["random-seed"], found["weight-version"], found["admin-api-key"]) == ("13", "7", "k")
    # Data-parallel ranks talk over ports above this address: they are held like the others.
    assert found["dist-init-addr"].startswith("127.0.0.1:") and len(fds) == 10


def test_pipeline_stages_share_the_engines_devices(command_of):
    found, _, fds = command_of(rollout_num_gpus_per_engine=8, sglang_pp_size=2)
    assert (found["tp-size"], found["pp-size"]) == ("4", "2")
    assert "dist-init-addr" not in found and len(fds) == 2


def test_each_node_of_an_engine_is_told_its_rank_and_where_to_meet(command_of):
    found, _, fds = command_of(
        rollout_num_gpus_per_engine=16, sglang_nnodes=2, sglang_node_rank=1, sglang_dist_init_addr="10.0.0.1:5000"
    )
    assert (found["nnodes"], found["node-rank"], found["dist-init-addr"]) == ("2", "1", "10.0.0.1:5000")
    assert found["tp-size"] == "16" and len(fds) == 2


def test_a_prefill_server_has_a_port_where_decode_servers_find_it(command_of):
    found, _, fds = command_of(sglang_disaggregation_mode="prefill")
    assert found["disaggregation-mode"] == "prefill" and int(found["disaggregation-bootstrap-port"]) > 0
    assert len(fds) == 3
    found, _, fds = command_of(sglang_disaggregation_mode="decode")
    assert found["disaggregation-mode"] == "decode" and "disaggregation-bootstrap-port" not in found


def test_speculative_decoding_is_the_servers(command_of):
    given = {"algorithm": "EAGLE", "num_steps": 3, "eagle_topk": 1, "num_draft_tokens": 4}
    found, _, _ = command_of(**{f"sglang_speculative_{name}": value for name, value in given.items()})
    assert {n: found[f"speculative-{n.replace('_', '-')}"] for n in given} == {n: str(v) for n, v in given.items()}


# ---- interpreters ------------------------------------------------------------------------------------------------------


@pytest.fixture
def interpreter(tmp_path, monkeypatch):
    """A fake `--sglang-python`: a shell script that answers the two questions; counts how often it describes itself."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def make(name: str, version: str = "echo 0.5.99 PACKAGE", describe: str = "echo '{}'") -> str:
        path = tmp_path / name
        (tmp_path / "sglang").mkdir(exist_ok=True)
        version = version.replace("PACKAGE", str(tmp_path / "sglang"))
        path.write_text(f'#!/bin/sh\nif [ "$1" = -c ]; then {version}; else echo x >> {path}.asked; {describe}; fi\n')
        path.chmod(0o755)
        return str(path)

    return make


DESCRIPTION = '{"version": "0.5.99", "options": {"--tp-size": {"field": "tp_size", "values": 1, "choices": null}}}'


def test_an_interpreter_is_asked_once_whatever_asks(interpreter, tmp_path):
    first = installed(interpreter("python-a", describe=f"echo noise; echo '{DESCRIPTION}'"))
    again = installed(interpreter("python-b", describe="exit 1"))  # the same environment by another name
    assert first.version == again.version == "0.5.99"
    assert again.find("tp_size").values == 1 and again.find("dp_size") is None
    assert not (tmp_path / "python-b.asked").exists()


def test_no_sglang_is_told_with_the_way_out(interpreter):
    lacks = "echo 'importlib.metadata.PackageNotFoundError: sglang' >&2; exit 1"
    with pytest.raises(SglangMissing, match=r"python-c has no SGLang: .*install_sglang_cpu.sh.*--sglang-python"):
        installed(interpreter("python-c", version=lacks))
    with pytest.raises(SglangMissing, match="is not an executable file"):
        installed("/nowhere/python")


def test_an_sglang_that_cannot_be_imported_is_told_with_its_own_words(interpreter):
    broken = interpreter("python-d", describe="echo 'ImportError: libcudart.so.13' >&2; exit 1")
    with pytest.raises(SglangMissing, match=r"SGLang 0\.5\.99 of .*python-d cannot be used: .*libcudart\.so\.13"):
        installed(broken)
