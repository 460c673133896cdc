"""From sizes, a YAML or addresses to the engines of a run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import yaml

from miles.backends.engine_api.topology import TopologyError, devices_of, engine_args, plan_engines
from miles.rollout.generate_state import request_concurrency


def make(**changes) -> SimpleNamespace:
    base = dict(
        debug_train_only=False,
        rollout_external=False,
        rollout_external_engine_addrs=None,
        sglang_config=None,
        prefill_num_servers=None,
        rollout_num_gpus=8,
        rollout_num_gpus_per_engine=2,
        num_gpus_per_node=8,
        hf_checkpoint="/models/a",
    )
    return SimpleNamespace(**base | changes)


@pytest.fixture
def config(tmp_path):
    def write(*models, **changes) -> SimpleNamespace:
        path = tmp_path / "topology.yaml"
        path.write_text(yaml.safe_dump({"sglang": list(models)}))
        return make(**{"sglang_config": str(path), "rollout_num_gpus": None} | changes)

    return write


def test_sizes_alone_give_equal_engines_in_a_row():
    specs = plan_engines(make())
    assert [(s.index, s.devices, s.offset, s.kind, s.nodes) for s in specs] == [
        (i, 2, 2 * i, "regular", 1) for i in range(4)
    ]
    assert plan_engines(make(debug_train_only=True)) == []


def test_an_engine_larger_than_a_node_spans_nodes():
    (first, second) = plan_engines(make(rollout_num_gpus=32, rollout_num_gpus_per_engine=16))
    assert (first.nodes, first.devices_per_node, second.offset) == (2, 8, 16)
    with pytest.raises(TopologyError, match="12 devices does not fill whole nodes of --num-gpus-per-node 8"):
        plan_engines(make(rollout_num_gpus=12, rollout_num_gpus_per_engine=12))


def test_the_first_servers_prefill_and_the_rest_decode():
    specs = plan_engines(make(prefill_num_servers=1))
    assert [s.kind for s in specs] == ["prefill", "decode", "decode", "decode"]
    args = make()
    assert engine_args(args, specs[0]).sglang_disaggregation_mode == "prefill"
    assert not hasattr(args, "sglang_disaggregation_mode"), "the run's own arguments stay as they are"
    with pytest.raises(TopologyError, match="needs prefill and decode engines"):
        plan_engines(make(prefill_num_servers=4))


def test_running_servers_have_addresses_and_no_devices():
    specs = plan_engines(make(rollout_external=True, rollout_external_engine_addrs=["h:1", "https://x/"]))
    assert [(s.address, s.devices) for s in specs] == [("http://h:1", 0), ("https://x", 0)]


def test_models_and_groups_follow_one_another_with_gaps_where_asked(config):
    args = config(
        {
            "num_gpus_per_engine": 1,
            "server_groups": [
                {"num_gpus": 2, "num_gpus_per_engine": 2, "overrides": {"mem_fraction_static": 0.5, "ep_size": 2}},
                {"worker_type": "placeholder", "num_gpus": 3},
                {"worker_type": "regular", "num_gpus": 2},
            ],
        },
        {"name": "judge", "model_path": "/models/b", "engine_groups": [{"num_gpus": 2}]},
    )
    specs = plan_engines(args)
    assert [(s.index, s.model, s.devices, s.offset, s.trained) for s in specs] == [
        (0, "actor", 2, 0, True),
        (1, "actor", 1, 5, True),
        (2, "actor", 1, 6, True),
        (3, "judge", 2, 7, False),
    ]
    assert devices_of(args) == 9
    assert request_concurrency(args) == 3 * 512, "three engines serve the model that is trained"
    own = engine_args(args, specs[0])
    assert own.sglang_mem_fraction_static == 0.5 and own.sglang_ep_size == 2 and own.rollout_num_gpus_per_engine == 2
    assert engine_args(args, specs[3]).hf_checkpoint == "/models/b"
    assert str(specs[3]) == "2 devices, model judge, not updated"


def test_whether_a_model_is_trained_is_inferred_and_can_be_said(config):
    group = {"server_groups": [{"num_gpus": 2}]}
    same = config({"model_path": "/models/a"} | group)
    assert plan_engines(same)[0].trained
    frozen = {"name": "frozen", "update_weights": False} | group
    assert [s.trained for s in plan_engines(config(group, frozen))] == [True, False]
    with pytest.raises(TopologyError, match="exactly one model is trained, and here 2 are"):
        plan_engines(config(group, {"name": "twin"} | group))
    with pytest.raises(TopologyError, match="here 0 are"):
        plan_engines(config(frozen))


def test_everything_that_is_wrong_with_a_yaml_is_told_at_once(config):
    args = config(
        {"nmae": "x"},
        {"name": "eval", "server_groups": [{"num_gpus": 3}]},
        {"name": "b", "server_groups": [{"worker_type": "chef", "num_gpus": 0, "overrides": {"port": 1}}, 7]},
        {"name": "b", "server_groups": []},
    )
    with pytest.raises(TopologyError) as error:
        plan_engines(args)
    for part in (
        "model 0: nmae is not known",
        "evaluation has no engines of its own",
        "num_gpus 3 is not a multiple of num_gpus_per_engine 2",
        "worker_type chef: one of regular",
        "num_gpus 0: a number above 0",
        "overrides: port is set for each engine by the run",
        "7 is no mapping",
        "model 3 (b): server_groups is a list",
        "two models are named b",
    ):
        assert part in str(error.value), part


def test_a_file_that_is_no_topology(tmp_path, config):
    for text, message in (("[", "expected"), ("a: 1", "its one key is `sglang`"), ("sglang: {}", "its one key")):
        path = tmp_path / "t.yaml"
        path.write_text(text)
        with pytest.raises(TopologyError, match=message):
            plan_engines(make(sglang_config=str(path)))
    group = {"server_groups": [{"num_gpus": 2}]}
    with pytest.raises(TopologyError, match="groups of 2 devices, --rollout-num-gpus says 4"):
        plan_engines(config(group, rollout_num_gpus=4))
