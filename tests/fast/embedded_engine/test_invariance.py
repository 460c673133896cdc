"""A request's tokens and log-probs are bit for bit the same whatever happens around it."""

from __future__ import annotations

import pytest
import torch

from tests.fast.embedded_engine.conftest import make_request, make_scheduler, prompt, run

FAMILIES = ("qwen3", "llama", "qwen3_moe")


def outcome(request):
    return request.output_ids, request.output_logprobs, request.input_logprobs


def subject(**options):
    """The request under test: its prompt crosses a page, its answer another one."""
    return make_request(prompt(90), **({"max_new_tokens": 50, "temperature": 0.9, "sampling_seed": 11} | options))


@pytest.fixture(params=FAMILIES)
def path(request, model_dirs):
    return model_dirs[request.param]


@pytest.fixture
def alone(path):
    return run(make_scheduler(path, prefix_caching=False), subject(logprob_start_len=0))[0]


def test_in_a_crowd_of_forty(path, alone):
    scheduler = make_scheduler(path, max_running_requests=24)
    crowd = [
        make_request(
            prompt(5 + 7 * i % 150, seed=i + 1),
            max_new_tokens=1 + 11 * i % 70,
            temperature=[0.0, 0.5, 1.3][i % 3],
            top_p=[1.0, 0.8][i % 2],
            sampling_seed=i,
        )
        for i in range(40)
    ]
    mine = subject(logprob_start_len=0)
    run(scheduler, *crowd[:20], mine, *crowd[20:])
    assert outcome(mine) == outcome(alone)


@pytest.mark.parametrize("chunk", [1, 7, 64, 100])
def test_prefilled_in_chunks(path, alone, chunk):
    mine = subject(logprob_start_len=0)
    run(make_scheduler(path, chunked_prefill_size=chunk), mine, make_request(prompt(130, seed=3), max_new_tokens=20))
    assert outcome(mine) == outcome(alone)


@pytest.mark.parametrize("shared", [8, 33, 64, 89, 90])
def test_after_a_cached_prefix(path, alone, shared):
    scheduler = make_scheduler(path)
    run(scheduler, make_request(prompt(90)[:shared] + prompt(40, seed=5), max_new_tokens=4))
    (mine,) = run(scheduler, subject())
    assert mine.cached_tokens == min(shared, 89)
    assert mine.output_ids == alone.output_ids and mine.output_logprobs == alone.output_logprobs


def test_a_next_turn_reuses_generated_tokens(path, alone):
    """The cache then holds keys that decoding wrote; a cold prefill must have given the same ones."""
    scheduler = make_scheduler(path)
    (first,) = run(scheduler, subject())
    turn = prompt(90) + first.output_ids + prompt(10, seed=9)
    (warm,) = run(scheduler, make_request(turn, max_new_tokens=30))
    (cold,) = run(make_scheduler(path, prefix_caching=False), make_request(turn, max_new_tokens=30))
    assert warm.cached_tokens == 139 and cold.cached_tokens == 0
    assert outcome(warm) == outcome(cold)


@pytest.mark.parametrize("steps", [1, 2, 30])
def test_retracted_and_resumed(path, alone, steps):
    scheduler = make_scheduler(path)
    mine = subject(logprob_start_len=0)
    scheduler.add(mine)
    with torch.inference_mode():
        for _ in range(steps):
            scheduler.step()
    scheduler.retract_all()
    scheduler.drop_cache()
    run(scheduler, *[make_request(prompt(60, seed=i), max_new_tokens=9) for i in range(5)])
    run_until_done(scheduler, mine)
    assert mine.retractions == 1
    assert outcome(mine) == outcome(alone)


def run_until_done(scheduler, request):
    with torch.inference_mode():
        while not request.finished:
            scheduler.step()


def test_retracted_for_lack_of_cache(path, alone):
    """Ten requests of 140 tokens do not fit 20 pages: some wait, some are retracted, none changes."""
    scheduler = make_scheduler(path, max_total_tokens=20 * 64)
    requests = [subject(sampling_seed=100 + i) for i in range(9)] + [subject()]
    run(scheduler, *requests)
    assert sum(r.retractions for r in requests) > 0, "the cache was large enough: nothing was tested"
    assert requests[-1].output_ids == alone.output_ids and requests[-1].output_logprobs == alone.output_logprobs
    assert scheduler.pool.num_free + scheduler.cache.num_pages == scheduler.pool.pages - 1, "pages leaked"


def test_two_threads(path, alone):
    torch.set_num_threads(2)
    try:
        (mine,) = run(make_scheduler(path), subject(logprob_start_len=0))
    finally:
        torch.set_num_threads(1)
    assert outcome(mine) == outcome(alone)


def test_routes_survive_caching_chunks_and_retraction(model_dirs):
    path = model_dirs["qwen3_moe"]
    (cold,) = run(make_scheduler(path, prefix_caching=False), subject())
    scheduler = make_scheduler(path, chunked_prefill_size=40)
    run(scheduler, make_request([*prompt(90)[:75], 5, 6, 7], max_new_tokens=3))
    mine = subject()
    scheduler.add(mine)
    with torch.inference_mode():
        for _ in range(12):
            scheduler.step()
        scheduler.retract_all()
    run_until_done(scheduler, mine)
    assert mine.cached_tokens == 75 and mine.retractions == 1
    assert mine.encoded_routes() == cold.encoded_routes() != ""
