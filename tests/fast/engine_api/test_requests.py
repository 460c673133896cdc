"""Requests that would end or confuse a server are refused before they are sent; servers that lack a call, before a run."""

from __future__ import annotations

from typing import Any

import pytest

from miles.backends.engine_api.capabilities import probe
from miles.backends.engine_api.client import EngineClient
from miles.backends.engine_api.errors import EngineStartError
from miles.backends.engine_api.requests import check_sampling_params, check_token_ids


def test_ids_outside_the_vocabulary_are_named_by_position():
    check_token_ids([[0, 9], [3]], 10)
    with pytest.raises(ValueError, match="prompt token 1 is 10"):
        check_token_ids([[0], [1, 10]], 10)
    with pytest.raises(ValueError, match="prompt token 0 is -1"):
        check_token_ids([-1], 10)


def test_misspelled_sampling_parameters_are_named():
    check_sampling_params(None)
    check_sampling_params([{"temperature": 1.0}, {"ebnf": "x"}])
    with pytest.raises(ValueError, match="max_tokens, temprature, which no engine knows"):
        check_sampling_params({"temprature": 1.0, "max_tokens": 3, "top_p": 1.0})


class FakeClient(EngineClient):
    def __init__(self, info: dict[str, Any], paths: set[str]) -> None:
        super().__init__("http://engine")
        self.info, self.paths = info, paths

    async def server_info(self, **_: Any) -> dict[str, Any]:
        return self.info

    async def endpoints(self, **_: Any) -> frozenset[str]:
        return frozenset(self.paths)


NEEDED = {"/generate", "/abort_request", "/pause_generation", "/continue_generation", "/flush_cache"}
NEEDED |= {"/init_weights_update_group", "/destroy_weights_update_group", "/update_weights_from_distributed"}
NEEDED |= {"/update_weight_version", "/weights_checker"}
SESSION = {"/begin_weight_update", "/end_weight_update"}


async def test_both_dialects_are_told_apart_by_what_the_server_answers():
    new = await probe(FakeClient({"version": "0.5.21", "device": "cpu"}, NEEDED | SESSION))
    old = await probe(FakeClient({"version": "0.5.16", "device": "cuda"}, NEEDED))
    assert (new.update_sessions, old.update_sessions) == (True, False)
    assert new.server == old.server == "sglang"
    assert (new.digests, old.digests) == ("served", "served-gpu"), "its checker has another digest on a GPU"
    embedded = await probe(FakeClient({"engine": "embedded"}, set()))
    assert (embedded.server, embedded.digests) == ("embedded", "tensor")


async def test_memory_is_released_by_servers_that_were_started_for_it():
    paths = NEEDED | {"/release_memory_occupation", "/resume_memory_occupation"}
    saver = {"version": "0.5.16", "device": "cuda", "enable_memory_saver": True}
    assert (await probe(FakeClient(saver, paths))).memory_release
    assert not (await probe(FakeClient(saver | {"enable_memory_saver": False}, paths))).memory_release
    assert not (await probe(FakeClient(saver, NEEDED))).memory_release
    assert (await probe(FakeClient({"engine": "embedded"}, set()))).memory_release


async def test_a_server_that_lacks_a_call_is_refused_by_name():
    with pytest.raises(EngineStartError, match=r"SGLang 0\.4\.0\) lacks /weights_checker"):
        await probe(FakeClient({"version": "0.4.0"}, NEEDED - {"/weights_checker"}))
