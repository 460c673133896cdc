"""The same requests to SGLang and to the embedded engine: the same answers, field by field, to rounding.

What may differ is listed here once, with the reason.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
import transformers

from miles.backends.engine_api.client import EngineClient, EngineRejected

PROMPT = list(range(10, 50))
OTHER = [7, 5, 3, 2]
TOLERANCE = 2e-5  # natural log; float32, other orders of summation
# Not facts about the model: names, clocks, and how much of a prompt a cache of other pages still had.
_FREE = {"id", "e2e_latency", "response_sent_to_client_ts", "cached_tokens", "cached_tokens_details"}


def assert_equal(ours: Any, theirs: Any, where: str = "answer") -> None:
    """Equal in shape and in every value; numbers that are no counts to TOLERANCE."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        assert ours.keys() - _FREE == theirs.keys() - _FREE, where
        for key in ours.keys() - _FREE:
            assert_equal(ours[key], theirs[key], f"{where}.{key}")
    elif isinstance(ours, list) and isinstance(theirs, list):
        assert len(ours) == len(theirs), where
        for i, pair in enumerate(zip(ours, theirs, strict=True)):
            assert_equal(*pair, f"{where}[{i}]")
    elif isinstance(ours, float) and isinstance(theirs, float):
        assert math.isclose(ours, theirs, abs_tol=TOLERANCE), f"{where}: {ours} and {theirs}"
    else:
        assert ours == theirs, f"{where}: {ours!r} and {theirs!r}"


REQUESTS = {
    "greedy": (PROMPT, {}),
    "again, from the prefix cache": (PROMPT, {}),
    "prompt log-probs": (PROMPT[:6], {"logprob_start_len": 0}),
    "prompt log-probs from a position": (PROMPT[:6], {"logprob_start_len": 3}),
    "scoring only": (PROMPT[:9], {"logprob_start_len": 0, "sampling_params": {"max_new_tokens": 1}}),
    "likeliest tokens": (PROMPT[:6], {"top_logprobs_num": 3, "logprob_start_len": 0}),
    "chosen tokens": (PROMPT[:6], {"token_ids_logprob": [5, 6], "logprob_start_len": 0}),
    "texts in log-probs": (PROMPT[:6], {"return_text_in_logprobs": True}),
    "a batch": ([PROMPT[:6], OTHER], {}),
    "two of each": ([PROMPT[:6], OTHER], {"sampling_params": {"n": 2}}),
    "one at a time": (PROMPT, {"sampling_params": {"max_new_tokens": 1}}),
    "no log-probs": (PROMPT[:6], {"return_logprob": False}),
    "biased": (PROMPT[:6], {"sampling_params": {"logit_bias": {"9": 50.0}, "max_new_tokens": 2}}),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_answers_are_equal(servers, name):
    input_ids, changes = REQUESTS[name]
    ours, theirs = (servers[engine].generate(input_ids, **changes) for engine in ("embedded", "sglang"))
    assert_equal(ours, theirs)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_stop_token_ends_both_alike(servers, ignore_eos):
    third = servers["sglang"].generate(PROMPT)["output_ids"][2]
    stop = {"stop_token_ids": [third], "ignore_eos": ignore_eos}
    ours, theirs = (s.generate(PROMPT, sampling_params=stop) for s in servers.values())
    assert_equal(ours, theirs)
    assert len(ours["output_ids"]) == (8 if ignore_eos else 3)


def test_a_stop_text_over_several_tokens_ends_both_alike(servers):
    tokenizer = transformers.AutoTokenizer.from_pretrained(servers["sglang"].model_dir)
    (letter,) = tokenizer.encode("a", add_special_tokens=False)
    asked = {"stop": ["aaa"], "logit_bias": {str(letter): 100.0}}
    ours, theirs = (s.generate(PROMPT, sampling_params=asked) for s in servers.values())
    assert_equal(ours, theirs)
    assert ours["output_ids"] == [letter] * 3 and ours["text"] == ""
    assert ours["meta_info"]["finish_reason"] == {"type": "stop", "matched": "aaa"}


def test_each_scores_what_the_other_sampled(servers):
    """Log-probs of sampled tokens are those of the distribution at temperature 1, whoever sampled."""
    for sampler, scorer in (("sglang", "embedded"), ("embedded", "sglang")):
        made = servers[sampler].generate(PROMPT, sampling_params={"temperature": 1.0, "max_new_tokens": 24})
        pairs = made["meta_info"]["output_token_logprobs"]
        assert [token for _, token, _ in pairs] == made["output_ids"]
        rows = PROMPT + made["output_ids"]
        scored = servers[scorer].generate(rows, logprob_start_len=0, sampling_params={"max_new_tokens": 1})
        expected = scored["meta_info"]["input_token_logprobs"][len(PROMPT) :]
        assert_equal(pairs, expected, sampler)


def test_log_probs_are_of_the_distribution_after_temperature(servers):
    """A greedy request's are not: there is no temperature to divide by."""
    for temperature in (0.5, 2.0):
        made = servers["sglang"].generate(PROMPT, sampling_params={"temperature": temperature, "max_new_tokens": 1})
        token = made["output_ids"][0]
        asked = {"temperature": temperature, "max_new_tokens": 1, "logit_bias": {str(token): 0.0}}
        ours = servers["embedded"].generate(PROMPT, token_ids_logprob=[token], sampling_params=asked)
        got = made["meta_info"]["output_token_logprobs"][0][0]
        assert_equal(ours["meta_info"]["output_token_ids_logprobs"][0][0][0], got, f"temperature {temperature}")


def test_greedy_and_sampled_requests_in_one_batch_keep_their_own_log_probs(servers):
    """Each row's temperature is its own, in a batch with others."""
    sampling = [{"max_new_tokens": 6, "temperature": t, "ignore_eos": True} for t in (0.0, 1.0, 0.0)]
    body = {"input_ids": [PROMPT, OTHER, OTHER], "sampling_params": sampling, "return_logprob": True}
    for server in servers.values():
        first, sampled, third = server.call(lambda client: client.generate(body))
        for greedy, prompt in ((first, PROMPT), (third, OTHER)):
            alone = server.generate(prompt, sampling_params={"max_new_tokens": 6})
            assert_equal(greedy["meta_info"]["output_token_logprobs"], alone["meta_info"]["output_token_logprobs"])
        rows = OTHER + sampled["output_ids"]
        scored = server.generate(rows, logprob_start_len=0, sampling_params={"max_new_tokens": 1})
        assert_equal(
            sampled["meta_info"]["output_token_logprobs"], scored["meta_info"]["input_token_logprobs"][len(OTHER) :]
        )


def test_a_stream_ends_with_the_whole_answer(servers):
    async def last(client: EngineClient) -> dict:
        sampling = {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True}
        chunks = [c async for c in client.generate_stream({"input_ids": PROMPT, "sampling_params": sampling})]
        return chunks[-1]

    ours, theirs = (server.call(last) for server in servers.values())
    assert_equal(ours, theirs)


def test_bad_requests_are_refused_by_both_with_the_same_kind_of_error(servers):
    for changes in ({"temperature": -1}, {"top_p": 0.0}, {"max_new_tokens": -1}):
        for server in servers.values():
            with pytest.raises(EngineRejected) as error:
                server.generate(PROMPT, sampling_params=changes)
            assert error.value.status == 400
    for server in servers.values():
        with pytest.raises(EngineRejected, match="2048"):
            server.generate([5] * 3000)
        with pytest.raises(ValueError, match="prompt token 1 is 320"):
            server.generate([5, 320])
        with pytest.raises(ValueError, match="temprature"):
            server.generate([5], sampling_params={"temprature": 1.0})
        assert server.generate(OTHER)["output_ids"], "it lives on"


def test_an_aborted_request_answers_with_what_it_has(servers):
    async def abort(client: EngineClient) -> tuple[dict, dict]:
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True}}
        running = [asyncio.create_task(client.generate(body | {"rid": rid})) for rid in ("one", "two")]
        await asyncio.sleep(0.5)
        await client.abort("one")
        first = await running[0]
        await client.abort(abort_all=True)
        return first, await running[1]

    for server in servers.values():
        for answer in server.call(abort):
            assert answer["meta_info"]["finish_reason"]["type"] == "abort"
            assert 0 < len(answer["output_ids"]) < 1500


def test_calls_without_the_key_are_refused_by_both(servers):
    async def stranger(url: str) -> None:
        async with EngineClient(url) as client:
            await client.pause("retract")

    for server in servers.values():
        with pytest.raises(EngineRejected, match="belongs to another run"):
            asyncio.run(stranger(server.process.url))
