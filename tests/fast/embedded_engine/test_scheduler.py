"""Admission, stopping, versions, siblings, and broken weights."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoTokenizer

from miles.backends.embedded_engine.stopping import GrowingText, final_text
from tests.fast.embedded_engine.conftest import make_request, make_scheduler, prompt, run


@pytest.fixture
def scheduler(model_dirs):
    return make_scheduler(model_dirs["qwen3"])


@pytest.fixture(scope="module")
def tokenizer(model_dirs):
    return AutoTokenizer.from_pretrained(model_dirs["qwen3"])


def steps(scheduler, n):
    with torch.inference_mode():
        for _ in range(n):
            scheduler.step()


def test_siblings_wait_for_the_first_one_to_fill_the_cache(scheduler):
    group = [make_request(prompt(100), max_new_tokens=3, sampling_seed=i) for i in range(8)]
    run(scheduler, *group)
    assert [r.cached_tokens for r in group] == [0] + [99] * 7


def test_the_batch_is_bounded_and_the_rest_waits(model_dirs):
    scheduler = make_scheduler(model_dirs["qwen3"], max_running_requests=3)
    requests = [make_request(prompt(10, seed=i), max_new_tokens=5) for i in range(7)]
    for request in requests:
        scheduler.add(request)
    steps(scheduler, 2)
    assert scheduler.num_active == 3 and len(scheduler.waiting) == 4
    run(scheduler)
    with torch.inference_mode():
        while scheduler.step():
            pass
    assert all(len(r.output_ids) == 5 for r in requests)


def test_decoding_goes_on_between_the_chunks_of_a_long_prompt(model_dirs):
    scheduler = make_scheduler(model_dirs["qwen3"], chunked_prefill_size=64)
    short = make_request(prompt(20), max_new_tokens=50)
    scheduler.add(short)
    steps(scheduler, 1)
    scheduler.add(make_request(prompt(640, seed=1), max_new_tokens=1))
    steps(scheduler, 12)
    assert len(short.output_ids) >= 6


def test_a_queue_that_never_ends_does_not_stop_those_that_decode(model_dirs):
    scheduler = make_scheduler(model_dirs["qwen3"], chunked_prefill_size=32)
    decoding = make_request(prompt(20), max_new_tokens=6)
    scheduler.add(decoding)
    steps(scheduler, 1)
    for seed in range(60):
        scheduler.add(make_request(prompt(32, seed=seed + 1), max_new_tokens=0))
    steps(scheduler, 50)
    assert scheduler.waiting or scheduler.prefilling, "the queue was to outlast the request"
    assert len(decoding.output_ids) == 6


def test_versions_are_stamped_token_by_token(scheduler):
    scheduler.weight_version = "3"
    request = make_request(prompt(10), max_new_tokens=9)
    scheduler.add(request)
    steps(scheduler, 4)
    scheduler.weight_version = "4"
    steps(scheduler, 2)
    scheduler.weight_version = "5"  # replaced before any token was sampled under it
    scheduler.weight_version = "6"
    steps(scheduler, 10)
    assert request.version_spans() == [
        {"version": "3", "start": 0, "end": 4},
        {"version": "4", "start": 4, "end": 6},
        {"version": "6", "start": 6, "end": 9},
    ]


def test_an_aborted_request_keeps_its_tokens_and_frees_its_pages(scheduler):
    request = make_request(prompt(100), max_new_tokens=50)
    scheduler.add(request)
    steps(scheduler, 6)
    scheduler.abort(request)
    assert request.finish_reason["type"] == "abort" and len(request.output_ids) == len(request.output_logprobs) == 6
    assert scheduler.num_requests == 0
    assert scheduler.pool.num_free + scheduler.cache.num_pages == scheduler.pool.pages - 1


def test_stop_tokens_end_a_request_and_are_kept_in_its_ids(scheduler):
    (free,) = run(scheduler, make_request(prompt(10), max_new_tokens=20))
    stop = free.output_ids[6]
    (stopped,) = run(scheduler, make_request(prompt(10), max_new_tokens=20, stop_token_ids=[stop]))
    first = free.output_ids.index(stop)
    assert stopped.output_ids == free.output_ids[: first + 1]
    assert stopped.finish_reason == {"type": "stop", "matched": stop}


def test_stop_strings_across_tokens(scheduler, tokenizer):
    (free,) = run(scheduler, make_request(prompt(10), max_new_tokens=40))
    text = tokenizer.decode(free.output_ids, skip_special_tokens=True)
    middle = len(text) // 2
    stop = text[middle : middle + 3]
    asked = make_request(prompt(10), max_new_tokens=40, stop=[stop])
    asked.stopper = GrowingText(tokenizer, asked.params)
    run(scheduler, asked)
    assert asked.finish_reason == {"type": "stop", "matched": stop}
    assert final_text(tokenizer, asked.output_ids, asked.params, asked.finish_reason) == text[: text.find(stop)]
    assert asked.output_ids == free.output_ids[: len(asked.output_ids)]
    assert stop in tokenizer.decode(asked.output_ids) and stop not in tokenizer.decode(asked.output_ids[:-1])


def test_growing_text_never_shows_half_a_character(tokenizer):
    text = "naïve 🙂 日本 done"
    ids = tokenizer.encode(text)
    growing = GrowingText(tokenizer, make_request([1]).params)
    seen = []
    for token in ids:
        growing.feed(token)
        seen.append(growing.text)
    assert growing.text == text and len(ids) > len(text)
    assert all(text.startswith(s) for s in seen)


def test_scoring_generates_nothing(scheduler):
    request = make_request(
        prompt(70), max_new_tokens=0, logprob_start_len=10, top_logprobs_num=2, token_ids_logprob=(5,)
    )
    run(scheduler, request)
    assert request.output_ids == [] and request.finish_reason == {"type": "length", "length": 0}
    assert len(request.input_logprobs) == len(request.input_top) == len(request.input_chosen) == 60
    assert request.input_logprobs[0] is None and request.input_top[0] is None
    for value, top, chosen in zip(
        request.input_logprobs[1:], request.input_top[1:], request.input_chosen[1:], strict=True
    ):
        assert len(top) == 2 and top[0][0] >= top[1][0] and top[0][0] >= value and chosen[0][1] == 5


def test_a_scored_prompt_uses_the_cache_up_to_its_first_scored_token(scheduler):
    run(scheduler, make_request(prompt(130), max_new_tokens=1))
    request = make_request(prompt(130), max_new_tokens=0, logprob_start_len=100)
    run(scheduler, request)
    cold = make_request(prompt(130), max_new_tokens=0, logprob_start_len=100, cache_namespace="cold")
    run(scheduler, cold)
    assert request.cached_tokens == 100 and cold.cached_tokens == 0
    assert request.input_logprobs == cold.input_logprobs


def test_non_finite_weights_fail_the_request_and_do_not_poison_the_next(scheduler):
    name = "model.layers.1.self_attn.v_proj.weight"
    good = scheduler.model.weights.slots[name].read().clone()
    (before,) = run(scheduler, make_request(prompt(100), max_new_tokens=8))
    scheduler.model.weights.write(name, torch.full_like(good, float("nan")))
    scheduler.model.weights.seal()
    scheduler.drop_cache()
    (broken,) = run(scheduler, make_request(prompt(100), max_new_tokens=8))
    assert broken.finish_reason["status_code"] == 500 and "non-finite" in broken.finish_reason["message"]
    scheduler.model.weights.write(name, good)
    scheduler.model.weights.seal()
    scheduler.drop_cache()
    (after,) = run(scheduler, make_request(prompt(100), max_new_tokens=8))
    assert after.output_logprobs == before.output_logprobs
