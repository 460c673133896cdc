"""One engine call for one sample: what is asked, what is kept, what is refused."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from miles.rollout.base_types import GenerateFnInput
from miles.rollout.generate_hub.engine_call import GenerationError
from miles.rollout.generate_hub.single_turn import generate
from miles.rollout.generate_state import GenerateState
from miles.utils.types import Sample, SampleStatus, VersionSpan
from tests.fast.rollout.fakes import FakePool, answer, make_args, write_tokenizer


class OneAnswer:
    def __init__(self, *answers):
        self.answers, self.payloads = list(answers), []

    async def generate(self, payload, routing_key=None):
        self.payloads.append(payload)
        self.routing_key = routing_key
        return self.answers.pop(0)


def state_for(model_dir, pool, **overrides):
    return GenerateState(make_args(model_dir, **overrides), pool)


async def run(state, sample, **params):
    return (await generate(GenerateFnInput(state, sample, {**state.sampling_params, **params}))).samples


STOP, LENGTH, ABORT = {"type": "stop", "matched": 1}, {"type": "length", "length": 3}, {"type": "abort", "message": ""}


async def test_the_engine_gets_ids_and_the_sample_keeps_its_ids(model_dir):
    pool = OneAnswer(answer([7, 8, 9], 2, STOP, version=4))
    sample = await run(state_for(model_dir, pool), Sample(index=0, prompt="ab", routing_key="k"))
    prompt = state_for(model_dir, pool).tokenizer("ab")["input_ids"]
    payload = pool.payloads[0]
    assert payload["input_ids"] == prompt
    assert payload["return_logprob"] is True
    assert payload["sampling_params"]["max_new_tokens"] == 8
    assert payload["sampling_params"]["no_stop_trim"] is True
    assert "return_routed_experts" not in payload
    assert pool.routing_key == "k"
    assert sample.tokens == [*prompt, 7, 8, 9]
    assert (sample.response_length, sample.loss_mask) == (3, [1, 1, 1])
    assert sample.rollout_log_probs == [-0.507, -0.508, -0.509]
    assert sample.version_spans == [VersionSpan(4, 0, 3)]
    assert sample.weight_versions == ["4"]
    assert sample.status is SampleStatus.COMPLETED


async def test_messages_go_through_the_chat_template(model_dir):
    pool = OneAnswer(answer([7], 2, STOP))
    state = state_for(model_dir, pool)
    await run(state, Sample(prompt=[{"role": "user", "content": "a"}]))
    text = state.tokenizer.decode(pool.payloads[0]["input_ids"])
    assert text == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"


async def test_a_partial_response_is_continued_within_its_limits(model_dir):
    pool = OneAnswer(answer([7, 8, 9], 2, ABORT, version=1), answer([1, 2], 5, LENGTH, version=2))
    state = state_for(model_dir, pool)
    sample = await run(state, Sample(prompt="ab"))
    assert sample.status is SampleStatus.ABORTED
    sample = await run(state, sample)
    assert pool.payloads[1]["input_ids"] == pool.payloads[0]["input_ids"] + [7, 8, 9]
    assert pool.payloads[1]["sampling_params"]["max_new_tokens"] == 5
    sample.validate()
    assert sample.tokens[-5:] == [7, 8, 9, 1, 2]
    assert sample.version_spans == [VersionSpan(1, 0, 3), VersionSpan(2, 3, 5)]
    assert sample.status is SampleStatus.TRUNCATED
    assert sample.response == state.tokenizer.decode([7, 8, 9, 1, 2])


async def test_a_mixed_version_answer_is_stamped_token_by_token(model_dir):
    mixed = answer([7, 8, 9], 2, STOP)
    mixed["meta_info"]["weight_versions"] = [
        {"version": "3", "start": 0, "end": 2},
        {"version": "4", "start": 2, "end": 3},
    ]
    sample = await run(state_for(model_dir, OneAnswer(mixed)), Sample(prompt="ab"))
    assert sample.version_spans == [VersionSpan(3, 0, 2), VersionSpan(4, 2, 3)]


async def test_engines_without_spans_stamp_the_whole_call_and_default_is_no_version(model_dir):
    sample = await run(state_for(model_dir, OneAnswer(answer([7, 8], 2, STOP, 5, spans=False))), Sample(prompt="ab"))
    assert sample.version_spans == [VersionSpan(5, 0, 2)]
    unversioned = answer([7, 8], 2, STOP, spans=False)
    unversioned["meta_info"]["weight_version"] = "default"
    sample = await run(state_for(model_dir, OneAnswer(unversioned)), Sample(prompt="ab"))
    assert sample.version_spans == []


async def test_the_context_length_bounds_the_response(tmp_path):
    directory = write_tokenizer(tmp_path, max_positions=6)
    pool = FakePool(length=lambda payload: 100)
    sample = await run(state_for(directory, pool), Sample(prompt="ab"))
    assert pool.requests[0]["sampling_params"]["max_new_tokens"] == 4
    assert len(sample.tokens) == 6
    assert sample.status is SampleStatus.TRUNCATED
    again = await run(state_for(directory, pool), sample)
    assert again.status is SampleStatus.TRUNCATED
    assert len(pool.requests) == 1, "no room left: the engine need not be asked"


async def test_a_prompt_that_fills_the_context_is_refused_for_good(model_dir):
    state = state_for(model_dir, OneAnswer(), rollout_max_context_len=4)
    with pytest.raises(
        GenerationError, match=r"5 tokens leaves no room .* of 4; --rollout-max-prompt-len 3 leaves"
    ) as error:
        await run(state, Sample(prompt="abcde"))
    assert error.value.permanent


async def test_an_answer_that_breaks_the_token_contract_is_refused(model_dir):
    mismatch = answer([7, 8], 2, STOP)
    mismatch["output_ids"] = [7, 9]
    nan = answer([7, 8], 2, STOP)
    nan["meta_info"]["output_token_logprobs"][1][0] = float("nan")
    bare = answer([7, 8], 2, STOP)
    del bare["meta_info"]["output_token_logprobs"]
    odd = answer([7, 8], 2, {"type": "exploded"})
    for broken, message in ((mismatch, "differ"), (nan, "log-prob of sampled token 1"), (bare, "without log-probs")):
        with pytest.raises(GenerationError, match=message):
            await run(state_for(model_dir, OneAnswer(broken)), Sample(prompt="ab"))
    with pytest.raises(ValueError, match="unknown finish_reason 'exploded'"):
        await run(state_for(model_dir, OneAnswer(odd)), Sample(prompt="ab"))


def routed(tokens, prompt, reason, value, start=0):
    """Layer 0 is dense, so that engines fill it with zeros."""
    result = answer(tokens, prompt, reason)
    routes = np.zeros((prompt + len(tokens) - 1 - start, 2, 2), dtype=np.int32)
    routes[:, 1] = value, value + 1
    result["meta_info"]["routed_experts"] = base64.b64encode(routes.tobytes()).decode()
    return result


async def test_routes_of_earlier_tokens_stay_as_they_were_sampled(model_dir):
    """The engine computes the whole prefix again when a partial sample goes on; only the new rows are asked for."""
    pool = OneAnswer(routed([7, 8], 2, ABORT, 1), routed([9], 4, STOP, 2, start=3))
    state = state_for(model_dir, pool, use_rollout_routing_replay=True)
    sample = await run(state, Sample(prompt="ab"))
    assert sample.rollout_routed_experts.shape == (3, 1, 2), "the dense layer stays behind"
    assert sample.rollout_routed_experts.dtype == np.uint8
    sample = await run(state, sample)
    asked = [(p["return_routed_experts"], p["routed_experts_start_len"]) for p in pool.payloads]
    assert asked == [(True, 0), (True, 3)]
    assert sample.rollout_routed_experts[:, 0].tolist() == [[1, 2], [1, 2], [1, 2], [2, 3]]
    sample.validate()


async def test_an_answer_without_a_token_leaves_no_routes_behind(model_dir):
    """Cut off in the middle of the prompt: what the engine has by then is no row for every token."""
    pool = OneAnswer(routed([], 2, ABORT, 1, start=1), routed([9], 2, STOP, 2))
    state = state_for(model_dir, pool, use_rollout_routing_replay=True)
    sample = await run(state, Sample(prompt="ab"))
    assert sample.rollout_routed_experts is None
    sample = await run(state, sample)
    assert sample.rollout_routed_experts.tolist() == [[[2, 3]], [[2, 3]]]


async def test_evaluation_asks_for_no_routes(model_dir):
    pool = OneAnswer(answer([9], 2, STOP))
    state = state_for(model_dir, pool, use_rollout_routing_replay=True)
    given = GenerateFnInput(state, Sample(prompt="ab"), dict(state.sampling_params), evaluation=True)
    assert (await generate(given)).samples.rollout_routed_experts is None
    assert "return_routed_experts" not in pool.payloads[0]


async def test_routes_that_are_not_those_of_the_tokens_are_refused(model_dir):
    short, unknown, twice, garbled = (
        routed([7, 8], prompt, STOP, value) for prompt, value in ((3, 1), (2, 7), (2, 1), (2, 1))
    )
    same = np.ones((3, 2, 2), np.int32)
    twice["meta_info"]["routed_experts"] = base64.b64encode(same.tobytes()).decode()
    garbled["meta_info"]["routed_experts"] = "?"
    cases = [
        (short, "sample 5: the engine sent 16 expert indices for 3 rows of 2 layers x 2 experts"),
        (unknown, r"sample 5: token 0 in layer 1 goes to experts \[7, 8\], and the model has experts 0 to 7"),
        (twice, r"sample 5: token 0 in layer 1 .* one of them twice: .* \(3 such places\)"),
        (garbled, "sample 5: routed_experts is no base64"),
        (answer([7, 8], 2, STOP), "sample 5: the engine sent no routed experts .* --enable-return-routed-experts"),
    ]
    for broken, message in cases:
        state = state_for(model_dir, OneAnswer(broken), use_rollout_routing_replay=True)
        with pytest.raises(GenerationError, match=message) as error:
            await run(state, Sample(index=5, prompt="ab"))
        assert error.value.category == "bad_routes"
