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
from tests.fast.sglang_utils.conftest import flags

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


def test_ranks_on_a_cpu_get_a_core_each_and_no_package_of_this_interpreter(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/here")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {4, 5})
    env = server_environment(flags(train_device="cpu"), None, ranks=3)
    assert env["SGLANG_CPU_OMP_THREADS_BIND"] == "4|5|4" and env["SGLANG_USE_CPU_ENGINE"] == "1"
    assert "PYTHONPATH" not in env
    on_gpu = server_environment(flags(train_device="cuda"), [2, 3], ranks=2)
    assert on_gpu["CUDA_VISIBLE_DEVICES"] == "2,3" and "SGLANG_USE_CPU_ENGINE" not in on_gpu


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
