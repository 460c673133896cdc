"""The one client of the engines' HTTP API, which is SGLang's; it drives SGLang and the embedded engine alike."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import orjson

from miles.backends.engine_api.errors import (
    EngineError,
    EngineFailed,
    EngineRejected,
    EngineStartError,
    EngineTimeout,
    EngineUnreachable,
)
from miles.backends.engine_api.http import HttpTransport, check, decode
from miles.backends.engine_api.requests import check_sampling_params, check_token_ids

__all__ = [
    "EngineClient",
    "EngineError",
    "EngineFailed",
    "EngineRejected",
    "EngineStartError",
    "EngineTimeout",
    "EngineUnreachable",
]

_FLUSH_POLL_S = 0.05


class EngineClient:
    """Calls to one engine server, each with a deadline.

    Every call may raise EngineUnreachable, EngineTimeout, EngineRejected (4xx or `success: false`) or EngineFailed (5xx).
    Control calls carry `admin_key`, which the engine was started with, so that no other run's engine obeys; all others
    carry `api_key`, which only a server that somebody else runs may want.

    Args:
        request_timeout_s: deadline of a generation. control_timeout_s: of every other call that is not given one.
        retries: further attempts of idempotent control calls after a lost connection or a 5xx.
        vocab_size: where given, prompts with ids outside of it are refused here, with the position.
        digests: what the server's checksums digest, as Capabilities says.
        dp_ranks: data-parallel ranks of the server, each with a prefix cache of its own.
        max_connections: at a time; 0 for any number.
    """

    def __init__(
        self,
        base_url: str,
        *,
        admin_key: str | None = None,
        api_key: str | None = None,
        request_timeout_s: float = 600.0,
        control_timeout_s: float = 60.0,
        retries: int = 2,
        vocab_size: int | None = None,
        digests: str = "tensor",
        dp_ranks: int = 1,
        max_connections: int = 0,
    ) -> None:
        self.request_timeout_s, self.control_timeout_s, self.vocab_size = (
            request_timeout_s,
            control_timeout_s,
            vocab_size,
        )
        self.digests, self.dp_ranks = digests, dp_ranks
        self._bootstrap_port: int | None = None
        self._http = HttpTransport(
            base_url, admin_key=admin_key, api_key=api_key, retries=retries, max_connections=max_connections
        )

    @property
    def base_url(self) -> str:
        return self._http.base_url

    @property
    def admin_key(self) -> str | None:
        return self._http.admin_key

    async def close(self) -> None:
        await self._http.close()

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self.close()

    async def post(self, path: str, body: Any = None, *, timeout_s: float | None = None, admin: bool = True) -> Any:
        """Any other endpoint of the engine, once."""
        return await self._http.call(
            "POST", path, {} if body is None else body, timeout_s=self._deadline(timeout_s), admin=admin
        )

    # ---- generation ------------------------------------------------------------------------------------------------

    async def generate(
        self, payload: dict[str, Any], *, timeout_s: float | None = None, routing_key: str | None = None
    ) -> Any:
        """`/generate`, raw: a dict, or a list of them for a batch. Sent once; cancelling it aborts it on the engine.

        `routing_key` goes out as a header: a router, or an engine's own scheduler, keeps equal ones together.
        """
        self._check(payload)
        timeout = self.request_timeout_s if timeout_s is None else timeout_s
        headers = _routing_header(routing_key)
        answer = await self._http.call("POST", "/generate", payload, timeout_s=timeout, admin=False, headers=headers)
        if not isinstance(answer, dict | list):
            raise EngineFailed(f"{self.base_url}/generate answered with {answer!r}, which is no generation", 200)
        return answer

    async def generate_stream(
        self, payload: dict[str, Any], *, timeout_s: float | None = None, routing_key: str | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """`/generate` with `stream`: the chunks as the server sends them. `timeout_s` covers the whole stream."""
        self._check(payload)
        timeout = self.request_timeout_s if timeout_s is None else timeout_s
        what = f"{self.base_url}/generate"
        try:
            async with (
                asyncio.timeout(timeout),
                self._http.open_session().post(
                    what,
                    data=orjson.dumps(payload | {"stream": True}, option=orjson.OPT_SERIALIZE_NUMPY),
                    headers=self._http.headers(admin=False) | _routing_header(routing_key),
                ) as reply,
            ):
                if reply.status != 200:
                    check(decode(await reply.read(), False, reply.status, what), reply.status, what)
                async for line in reply.content:
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    chunk = orjson.loads(data)
                    if "error" in chunk:
                        raise EngineFailed(f"{what} failed in mid-stream: {chunk['error']}", 500)
                    yield chunk
            raise EngineUnreachable(f"{what}: the stream ended without [DONE]")
        except TimeoutError:
            raise EngineTimeout(f"{what} did not finish its stream within {timeout:g} s") from None
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError) as error:
            raise EngineUnreachable(f"{what}: connection lost: {type(error).__name__}: {error}") from error

    async def abort(self, rid: str | None = None, *, abort_all: bool = False, timeout_s: float | None = None) -> None:
        """Abort the requests whose id starts with `rid`, or all. They answer with what they have."""
        if not rid and not abort_all:
            raise ValueError("abort: give a request id, or abort_all=True")
        await self._idempotent("/abort_request", {"rid": rid or "", "abort_all": abort_all}, timeout_s)

    # ---- state -----------------------------------------------------------------------------------------------------

    async def health(self, *, timeout_s: float | None = None) -> None:
        """Raises unless the server answers `/health` with 200: one that is still loading answers 503.

        For start-up. A paused SGLang does not answer it at all: ask `alive` whether a running engine lives.
        """
        await self._http.call("GET", "/health", timeout_s=self._deadline(timeout_s))

    async def alive(self, *, timeout_s: float | None = None) -> None:
        """Raises unless the server answers; it does so while paused, too. Asked once."""
        await self._http.call("GET", "/model_info", timeout_s=self._deadline(timeout_s))

    async def server_info(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        return await self._http.call("GET", "/server_info", timeout_s=self._deadline(timeout_s), idempotent=True)

    async def model_info(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        return await self._http.call("GET", "/model_info", timeout_s=self._deadline(timeout_s), idempotent=True)

    async def bootstrap_port(self) -> int:
        """The port where a prefill server meets decode servers; asked once."""
        if self._bootstrap_port is None:
            self._bootstrap_port = int((await self.server_info())["disaggregation_bootstrap_port"])
        return self._bootstrap_port

    async def endpoints(self, *, timeout_s: float | None = None) -> frozenset[str]:
        """Paths that the server answers, by its own description (`/openapi.json`)."""
        answer = await self._http.call("GET", "/openapi.json", timeout_s=self._deadline(timeout_s), idempotent=True)
        return frozenset(answer["paths"])

    async def release_memory(self, tags: Sequence[str] | None = None, *, timeout_s: float | None = None) -> None:
        """Give memory back: some of weights, kv_cache, cuda_graph; all for None. The engine must be idle."""
        await self.post("/release_memory_occupation", _tags(tags), timeout_s=timeout_s)

    async def resume_memory(self, tags: Sequence[str] | None = None, *, timeout_s: float | None = None) -> None:
        """Take memory again. Resume only what was released."""
        await self.post("/resume_memory_occupation", _tags(tags), timeout_s=timeout_s)

    # ---- weight updates --------------------------------------------------------------------------------------------

    async def pause(self, mode: str, *, timeout_s: float | None = None) -> None:
        """Stop generating. `mode`: abort, retract (recompute the KV cache afterwards) or in_place (keep it)."""
        await self._idempotent("/pause_generation", {"mode": mode}, timeout_s)

    async def continue_(self, *, timeout_s: float | None = None) -> None:
        await self._idempotent("/continue_generation", {}, timeout_s)

    async def flush(self, *, timeout_s: float | None = None) -> None:
        """Drop the prefix cache; waits while the engine is too busy to. Raises EngineTimeout if it stays so."""
        timeout = self._deadline(timeout_s)
        deadline = time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            try:
                return await self._http.call("POST", "/flush_cache", timeout_s=max(left, 0.01), idempotent=True)
            except EngineRejected as error:
                if error.status != 400:
                    raise
                if time.monotonic() + _FLUSH_POLL_S >= deadline:
                    raise EngineTimeout(
                        f"{self.base_url}/flush_cache was refused for {timeout:g} s because requests are pending: {error}"
                    ) from error
                await asyncio.sleep(_FLUSH_POLL_S)

    async def begin_weight_update(self, selector: str = "all", *, timeout_s: float | None = None) -> bool:
        """Open an update session. False where the server has none (404; SGLang before 0.5.21): none is needed."""
        return await self._unless_404("/begin_weight_update", {"selector": selector}, timeout_s)

    async def end_weight_update(self, *, timeout_s: float | None = None) -> bool:
        """Close the update session. False where the server has none."""
        return await self._unless_404("/end_weight_update", {}, timeout_s)

    async def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Let the engine's ranks join a group as ranks `rank_offset ...`; answers when all ranks have joined."""
        body = dict(master_address=master_address, master_port=master_port, rank_offset=rank_offset)
        body |= dict(world_size=world_size, group_name=group_name, backend=backend)
        await self.post("/init_weights_update_group", body, timeout_s=timeout_s)

    async def destroy_weights_update_group(self, group_name: str, *, timeout_s: float | None = None) -> None:
        await self.post("/destroy_weights_update_group", {"group_name": group_name}, timeout_s=timeout_s)

    async def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        *,
        load_format: str | None = "flattened_bucket",
        flush_cache: bool = False,
        selector: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Receive one bucket from rank 0 of a joined group: one uint8 tensor, the bytes of all in order."""
        body = dict(names=list(names), dtypes=list(dtypes), shapes=[list(s) for s in shapes], group_name=group_name)
        body |= dict(load_format=load_format, flush_cache=flush_cache)
        await self.post("/update_weights_from_distributed", body | _selector(selector), timeout_s=timeout_s)

    async def update_weights_from_tensor(
        self,
        serialized_named_tensors: Sequence[str],
        *,
        load_format: str | None = None,
        flush_cache: bool = False,
        selector: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Load tensors from serialized handles, one base64 string an engine rank."""
        body = dict(
            serialized_named_tensors=list(serialized_named_tensors), load_format=load_format, flush_cache=flush_cache
        )
        await self.post("/update_weights_from_tensor", body | _selector(selector), timeout_s=timeout_s)

    async def update_weights_from_disk(
        self,
        path: str,
        weight_version: str | int | None = None,
        *,
        flush_cache: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        body = dict(model_path=path, flush_cache=flush_cache, abort_all_requests=False)
        if weight_version is not None:
            body["weight_version"] = str(weight_version)
        await self.post("/update_weights_from_disk", body, timeout_s=timeout_s)

    async def update_weight_version(
        self, version: int | str, abort_all_requests: bool = False, *, timeout_s: float | None = None
    ) -> None:
        """Name the weights. The server's own default would abort every request in flight; ours does not."""
        body = {"new_version": str(version), "abort_all_requests": abort_all_requests}
        await self._idempotent("/update_weight_version", body, timeout_s)

    async def weights_checksums(self, *, timeout_s: float | None = None) -> dict[str, str]:
        """Digest of every tensor that the engine's first rank serves, by name."""
        answer = await self.weights_checker("checksum", timeout_s=timeout_s)
        try:
            return dict(answer["ranks"][0]["checksums"])
        except (KeyError, IndexError, TypeError):
            raise EngineFailed(f"{self.base_url}/weights_checker gave no checksums: {str(answer)[:200]}", 200) from None

    async def weights_checker(self, action: str, *, timeout_s: float | None = None, **options: Any) -> dict[str, Any]:
        """`action`: checksum, snapshot, reset_tensors or compare; options: allow_quant_error, skip_tensor_list, selector."""
        body = {"action": action} | {k: v for k, v in options.items() if v is not None}
        return await self.post("/weights_checker", body, timeout_s=timeout_s)

    # ---- helpers ---------------------------------------------------------------------------------------------------

    def _check(self, payload: dict[str, Any]) -> None:
        check_token_ids(payload.get("input_ids"), self.vocab_size)
        check_sampling_params(payload.get("sampling_params"))

    def _deadline(self, timeout_s: float | None) -> float:
        return self.control_timeout_s if timeout_s is None else timeout_s

    async def _idempotent(self, path: str, body: dict[str, Any], timeout_s: float | None) -> Any:
        return await self._http.call("POST", path, body, timeout_s=self._deadline(timeout_s), idempotent=True)

    async def _unless_404(self, path: str, body: dict[str, Any], timeout_s: float | None) -> bool:
        try:
            await self.post(path, body, timeout_s=timeout_s)
        except EngineRejected as error:
            if error.status == 404:
                return False
            raise
        return True


def _routing_header(key: str | None) -> dict[str, str]:
    return {} if key is None else {"X-SMG-Routing-Key": key}


def _tags(tags: Sequence[str] | None) -> dict[str, list[str]]:
    return {} if tags is None else {"tags": list(tags)}


def _selector(selector: str | None) -> dict[str, str]:
    # Not sent unless given: servers before 0.5.21 do not know the field.
    return {} if selector is None else {"selector": selector}
