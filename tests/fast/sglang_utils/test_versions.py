"""Releases differ: what the installed one lacks is refused by name, and one that nobody tried is told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from miles.arguments import make_args
from miles.arguments.rules.sglang import installation as installation_rule
from miles.arguments.rules.sglang import not_known
from miles.backends.sglang_utils.installation import Installation, Option, SglangMissing
from miles.backends.sglang_utils.versions import lacking, release, untried

EVERY_RELEASE = ["admin_api_key", "weight_version", "random_seed", "nccl_port", "dist_init_addr", "nnodes", "tp_size"]
SINCE_059 = ["enable_return_routed_experts"]


def sglang(version: str, *fields: str) -> Installation:
    options = {f"--{f.replace('_', '-')}": Option(f"--{f.replace('_', '-')}", f, 1, None) for f in fields}
    return Installation("/env/bin/python", version, options)


# As the release notes of the servers that were looked at have it: return_routed_experts came after 0.5.6.post2.
OLD, NEW = sglang("0.5.6.post2", *EVERY_RELEASE), sglang("0.5.21", *EVERY_RELEASE, *SINCE_059, "enable_memory_saver")


def args(**changes):
    fields = {"rollout_engine": "sglang", "train_device": "cpu", "rollout_num_gpus": 1, "rollout_batch_size": 2}
    return make_args(check=False, **fields | changes)


def test_an_older_release_lacks_what_a_flag_needs_and_says_which_has_it():
    replay = args(use_rollout_routing_replay=True)
    assert list(lacking(replay, NEW)) == []
    (said,) = lacking(replay, OLD)
    assert "SGLang 0.5.6.post2 (/env/bin/python) has no option --enable-return-routed-experts" in said
    assert "--use-rollout-routing-replay needs: install SGLang 0.5.9 or newer" in said
    assert list(lacking(args(), OLD)) == [], "what a run does not ask for does not matter"


def test_everything_that_lacks_comes_at_once():
    bare = sglang("0.4.0", "tp_size")
    said = list(lacking(args(prefill_num_servers=1, sglang_dp_size=2), bare))
    for option in ("--admin-api-key", "--weight-version", "--nccl-port", "--disaggregation-mode", "--dist-init-addr"):
        assert any(option in each for each in said), option


@pytest.mark.parametrize(
    ("version", "said"),
    [("0.5.16", None), ("0.5.23", None), ("0.5.6.post2", "older"), ("0.6.0rc1", "newer"), ("main", "unknown version")],
)
def test_a_release_that_nobody_tried_is_told(version, said):
    found = untried(replace(NEW, version=version))
    assert found is None if said is None else said in found and "0.5.16 to 0.5.23" in found
    assert release("0.5.17.post1") == (0, 5, 17)


def test_startup_refuses_and_warns_by_what_the_interpreter_answers(monkeypatch):
    monkeypatch.setattr("miles.arguments.rules.sglang.installed", lambda python: OLD)
    assert any(
        "has no option --enable-return-routed-experts" in p
        for p in installation_rule(args(use_rollout_routing_replay=True))
    )
    assert any("is older" in w for w in not_known(args()))
    external = args(rollout_external=True, rollout_external_engine_addrs=["h:1"], rollout_num_gpus=None)
    assert list(installation_rule(external)) == list(not_known(external)) == []


def test_a_plan_is_made_where_sglang_is_not(monkeypatch):
    def nothing(python):
        raise SglangMissing("python has no SGLang: install it")

    monkeypatch.setattr("miles.arguments.rules.sglang.installed", nothing)
    assert list(installation_rule(args())) == ["--rollout-engine sglang: python has no SGLang: install it"]
    assert list(installation_rule(args(dry_run=True))) == []
    (warning,) = not_known(args(dry_run=True))
    assert "which the run itself will do" in warning
