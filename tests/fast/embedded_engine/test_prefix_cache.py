"""The tree of cached pages."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.backends.embedded_engine.kv_cache import PAGE, PagePool
from miles.backends.embedded_engine.model_config import load_model_config
from miles.backends.embedded_engine.prefix_cache import MIN_PARTIAL, PrefixCache, common_prefix
from tests.fast.embedded_engine.conftest import make_request, make_scheduler, prompt, run
from tests.helpers.tiny_models import make_tiny_model


class Filled:
    """A pool whose every cached token can be read back: its key is the token id at its position."""

    def __init__(self, config, pages: int):
        self.pool = PagePool(config, pages, torch.device("cpu"), torch.float32)
        self.cache = PrefixCache(self.pool)

    def store(self, *sequences: list[int], namespace: str = "") -> None:
        """Insert sequences that finish in one step: a page that one gives back may become a cached page of the next."""
        held = []
        for tokens in sequences:
            pages = [self._take() for _ in range(-(-len(tokens) // PAGE))]
            for i, token in enumerate(tokens):
                self.pool.kv[:, :, pages[i // PAGE], :, i % PAGE] = token
            held.append((tokens, pages))
        for tokens, pages in held:
            self.cache.insert(namespace, tokens, pages)
            for page in pages:
                self.pool.give_back(page)
        self.cache.commit()

    def _take(self) -> int:
        while (page := self.pool.take_low()) is None:
            assert self.cache.evict_one()
        page = self.cache.trade_for_lower(page)
        assert page < min(self.cache._by_page, default=self.pool.pages), "what runs lies below what is cached"
        return page

    def read(self, tokens: list[int], namespace: str = "") -> list[int]:
        match = self.cache.match(namespace, tokens, len(tokens))
        return [int(self.pool.kv[0, 0, match.pages[i // PAGE], 0, i % PAGE, 0]) for i in range(match.length)]


def config_of(tmp_path_factory):
    return load_model_config(make_tiny_model(tmp_path_factory.mktemp("pc"), num_hidden_layers=1))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_what_is_found_is_what_was_stored(data, tmp_path_factory):
    """Random sequences over two letters share prefixes of all lengths; the pool is small, so that pages are evicted."""
    if not hasattr(test_what_is_found_is_what_was_stored, "config"):
        test_what_is_found_is_what_was_stored.config = config_of(tmp_path_factory)
    filled = Filled(test_what_is_found_is_what_was_stored.config, 12)
    stored: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 8))):
        if stored and data.draw(st.booleans()):
            base = data.draw(st.sampled_from(stored))
            head = base[: data.draw(st.integers(0, min(len(base), 200)))]
            tokens = head + data.draw(st.lists(st.integers(1, 2), max_size=90))
        else:
            tokens = data.draw(st.lists(st.integers(1, 2), min_size=1, max_size=200))
        together = [tokens, *data.draw(st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=90), max_size=2))]
        filled.store(*(sequence for sequence in together if sequence))
        stored += [sequence for sequence in together if sequence]
        probe = [*data.draw(st.sampled_from(stored)), 1, 2]
        found = filled.read(probe)
        assert found == probe[: len(found)]
        assert filled.pool.num_free + filled.cache.num_pages == filled.pool.pages - 1
    last = stored[-1]
    assert len(filled.read(last)) >= len(last) - MIN_PARTIAL + 1, "the newest sequence fits and must be found"


def test_namespaces_are_apart_and_clear_forgets(tmp_path_factory):
    filled = Filled(config_of(tmp_path_factory), 8)
    filled.store(list(range(1, 101)), namespace="a")
    assert filled.read(list(range(1, 101)), "b") == []
    assert len(filled.read(list(range(1, 101)), "a")) == 100
    filled.cache.clear()
    assert filled.read(list(range(1, 101)), "a") == [] and filled.pool.num_free == 7


def test_the_least_recently_used_leaf_goes_first(tmp_path_factory):
    filled = Filled(config_of(tmp_path_factory), 8)
    for first in (1, 2, 3):
        filled.store([first] * PAGE)
    filled.read([1] * PAGE)
    filled.cache.evict_one()
    assert filled.read([2] * PAGE) == [] and filled.read([1] * PAGE) and filled.read([3] * PAGE)


def test_common_prefix():
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2 and common_prefix([], [1]) == 0 and common_prefix([1], [1, 2]) == 1


def test_weights_that_change_invalidate_every_prefix(model_dirs):
    """The same prompt before and after a change: the second answer must be that of the new weights alone."""
    ids = prompt(130)
    scheduler = make_scheduler(model_dirs["qwen3"])
    (before,) = run(scheduler, make_request(ids, max_new_tokens=5))
    weights = scheduler.model.weights
    name = "model.layers.0.self_attn.v_proj.weight"
    changed = weights.slots[name].read().clone() + 0.2
    weights.write(name, changed)
    weights.seal()
    scheduler.drop_cache()
    (after,) = run(scheduler, make_request(ids, max_new_tokens=5))
    fresh = make_scheduler(model_dirs["qwen3"])
    fresh.model.weights.write(name, changed)
    fresh.model.weights.seal()
    (expected,) = run(fresh, make_request(ids, max_new_tokens=5))
    assert after.cached_tokens == 0
    assert after.output_logprobs == expected.output_logprobs != before.output_logprobs


def test_a_request_that_spans_a_change_of_weights_leaves_nothing_in_the_cache(model_dirs):
    scheduler = make_scheduler(model_dirs["qwen3"])
    mixed = make_request(prompt(80), max_new_tokens=20)
    scheduler.add(mixed)
    with torch.inference_mode():
        for _ in range(5):
            scheduler.step()
    weights = scheduler.model.weights
    weights.write("model.norm.weight", weights.slots["model.norm.weight"].read() * 1.5)
    scheduler.drop_cache()
    run(scheduler)
    with torch.inference_mode():
        while not mixed.finished:
            scheduler.step()
    assert scheduler.cache.num_pages == 0
