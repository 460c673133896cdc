"""What the launcher is told, and what it tells the run's processes."""

from __future__ import annotations

import pytest

from miles.launch import environment
from miles.launch.environment import run_environment
from miles.launch.options import REPOSITORY, LaunchError, parse

AMBIENT = ("SLURM_JOB_NUM_NODES", "SLURM_NODEID", "RAY_ADDRESS", "MILES_SCRIPT_NUM_NODES", "MILES_SCRIPT_DRIVER")


@pytest.fixture(autouse=True)
def no_ambient(monkeypatch):
    for name in AMBIENT:
        monkeypatch.delenv(name, raising=False)


def test_flags_of_the_driver_are_passed_as_they_are():
    options = parse(["--num-gpus", "4", "--", "--lr", "1e-6", "--num-nodes", "9", "--dry-run"])
    assert options.driver_flags == ("--lr", "1e-6", "--num-nodes", "9", "--dry-run")
    assert options.num_gpus == 4 and options.num_nodes == 1 and options.dry_run
    assert options.driver == str(REPOSITORY / "train.py") and options.submit == "direct"


def test_options_come_from_flags_then_scripts_variables_then_the_batch_system(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    monkeypatch.setenv("SLURM_NODEID", "1")
    monkeypatch.setenv("MILES_SCRIPT_HEAD", "node0")
    assert (parse([]).num_nodes, parse([]).node_rank, parse([]).head) == (2, 1, "node0")
    monkeypatch.setenv("MILES_SCRIPT_NUM_NODES", "4")
    monkeypatch.setenv("MILES_SCRIPT_DRIVER", "train_async.py")
    assert parse([]).num_nodes == 4 and parse([]).driver.endswith("train_async.py")
    assert parse(["--num-nodes", "3"]).num_nodes == 3


def test_everything_that_is_wrong_is_told_at_once():
    with pytest.raises(LaunchError) as error:
        parse(["--num-nodes", "2", "--node-rank", "2", "--driver", "nowhere.py", "--env", "NAME"])
    for part in ("--node-rank 2", "--head", "nowhere.py", "NAME=VALUE"):
        assert part in str(error.value)
    with pytest.raises(LaunchError, match=r"--submit job needs .* http://HOST:8265"):
        parse(["--address", "head:6379", "--submit", "job"])
    with pytest.raises(LaunchError, match="give one of them"):
        parse(["--address", "head:6379", "--num-nodes", "2"])
    assert parse(["--address", "http://head:8265"]).submit == "job"


def test_what_fits_the_flags_then_what_is_there_then_what_is_given():
    flags = ["--train-backend", "megatron", "--train-backend=fsdp"]
    env = run_environment(flags, "10.0.0.1", {"MINE": "1"}, {"NCCL_DEBUG": "INFO", "PYTHONPATH": "/mine", "HOME": "/h"})
    assert env["PYTHONPATH"] == f"{REPOSITORY}:/mine" and env["MASTER_ADDR"] == "10.0.0.1"
    assert env["NCCL_DEBUG"] == "INFO" and env["MINE"] == "1" and "HOME" not in env
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in env, "FSDP wants its streams to run side by side"
    assert env["no_proxy"] == "127.0.0.1,localhost,10.0.0.1"
    ambient = {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "no_proxy": "intranet", "MILES_SCRIPT_MEGATRON_PATH": "/megatron"}
    env = run_environment([], "h", {"NCCL_DEBUG": "WARN"}, ambient | {"NCCL_DEBUG": "INFO"})
    assert env["CUDA_DEVICE_MAX_CONNECTIONS"] == "8" and env["NCCL_DEBUG"] == "WARN"
    assert env["no_proxy"] == "intranet,127.0.0.1,localhost,h"
    assert env["PYTHONPATH"] == f"{REPOSITORY}:/megatron" and not any(k.startswith("MILES_SCRIPT") for k in env)
    assert run_environment([], "h", {}, {})["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


@pytest.mark.parametrize(("links", "expected"), [("GPU0\tX\tNV18", "1"), ("GPU0\tX\tPIX", "0")])
def test_nvlink_decides_over_nccls_multicast(monkeypatch, tmp_path, links, expected):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{links}\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert environment.has_nvlink() is (expected == "1")
    assert run_environment([], "h", {}, {})["NCCL_NVLS_ENABLE"] == expected
    assert run_environment([], "h", {}, {"NCCL_NVLS_ENABLE": "0"})["NCCL_NVLS_ENABLE"] == "0"
