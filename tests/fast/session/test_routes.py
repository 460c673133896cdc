"""Routed experts through a session: asked for from where the row before ended, and a row for every token of the sample but the last."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest

from tests.fast.session.conftest import check_sample, user

LAYERS, EXPERTS = 3, 300  # more than one byte holds


def rows_of(tokens: list[int]) -> np.ndarray:
    """What the engine says of each token, `[tokens, layers, 2]`; the first layer is dense."""
    table = np.zeros((len(tokens), LAYERS, 2), np.int32)
    for i, token in enumerate(tokens):
        for layer in range(1, LAYERS):
            first = (token * 31 + i * 7 + layer) % EXPERTS
            table[i, layer] = first, (first + 1) % EXPERTS
    return table


@pytest.fixture
def model(tmp_path):
    config = {"num_hidden_layers": LAYERS, "num_experts": EXPERTS, "num_experts_per_tok": 2, "mlp_only_layers": [0]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def routing(server):
    """Let the engine report routes."""

    def report(answer):
        payload = server.engine.payloads[-1]
        whole = [int(i) for i in payload["input_ids"]] + answer["output_ids"]
        table = rows_of(whole)[payload["routed_experts_start_len"] : len(whole) - 1]
        answer["meta_info"]["routed_experts"] = base64.b64encode(table.tobytes()).decode()
        return answer

    server.engine.change = report
    return server


@pytest.mark.parametrize("family", ["qwen3", "glm47", "gptoss"])
async def test_a_sample_has_the_route_of_every_token_but_the_last(serve, model, family):
    """In families whose stop token is dropped before the next message too."""
    server = routing(serve(family, hf_checkpoint=model, routed_experts=True))
    chat = await server.open()
    messages = [user("hi")]
    for text in ("a", "b", "c"):
        messages += [await chat.say(messages), user(text)]
    [sample] = (await chat.samples()).samples
    check_sample(sample)
    expected = rows_of(sample.tokens)[:-1, 1:]
    assert sample.rollout_routed_experts.dtype == np.uint16
    assert np.array_equal(sample.rollout_routed_experts, expected)
    starts = [p["routed_experts_start_len"] for p in server.engine.payloads]
    assert starts[0] == 0 and starts[2] > starts[1] > 0, "each turn brings its own rows only"
    [cut] = (await chat.samples(max_seq_len=len(sample.tokens) - 3)).samples
    check_sample(cut)
    assert np.array_equal(cut.rollout_routed_experts, expected[: len(cut.tokens) - 1])


async def test_routes_survive_the_end_of_the_process(serve, model, tmp_path):
    config = {"hf_checkpoint": model, "routed_experts": True, "log_dir": str(tmp_path / "log"), "key": "k"}
    chat = await routing(serve(**config)).open()
    said = await chat.say([user("hi")])
    await chat.say([user("hi"), said, user("go on")])
    [before] = (await chat.samples()).samples
    chat.server = serve(**config)
    [after] = (await chat.samples()).samples
    assert after.tokens == before.tokens and len(after.tokens)
    assert np.array_equal(after.rollout_routed_experts, before.rollout_routed_experts)
    assert after.rollout_routed_experts.dtype == before.rollout_routed_experts.dtype


@pytest.mark.parametrize(
    ("change", "message"), [(lambda r: r[1:], "expert indices for"), (lambda r: r + EXPERTS, "0 to 299")]
)
async def test_wrong_routes_fail_the_turn_and_leave_nothing(serve, model, change, message):
    server = serve(hf_checkpoint=model, routed_experts=True)
    chat = await server.open()

    def report(answer):
        table = change(rows_of([int(i) for i in server.engine.payloads[-1]["input_ids"]] + answer["output_ids"][:-1]))
        answer["meta_info"]["routed_experts"] = base64.b64encode(table.tobytes()).decode()
        return answer

    server.engine.change = report
    answer = await chat.post([user("hi")])
    assert answer.status_code == 502 and message in answer.text
    assert not chat.session.history.nodes
