"""Processes beside the rollout manager that call the engines: started, told of the engines, watched, restarted, ended."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from miles.router.engine_pool import EnginePool
from miles.router.members import EngineAddress
from miles.utils.process import reserve_port, spawn, tail, terminate
from miles.utils.process_logging import log_path

logger = logging.getLogger(__name__)

_TICK_S = 0.5
_REPEAT_S = 5.0  # engines that a server took for dead are named to it again
_CALL_TIMEOUT_S = 10.0


class ServerStartError(RuntimeError):
    """A server process that does not start."""


@dataclass
class ServerProcess:
    """One process, and what it was told of the engines."""

    name: str
    port: int
    config_path: Path
    log_path: Path
    process: subprocess.Popen | None = None
    restarts: int = 0
    engines: dict[int, EngineAddress] | None = None
    told_at: float = 0.0


class PoolServers:
    """Server processes of one kind, each on a port of its own. Lives in one event loop.

    A process is `python -m MODULE --config FILE --fd N`: its configuration as JSON, and a listening socket that it
    inherits. It answers `GET /health`, and takes `PUT /engines` with the run's key.

    Args:
        title: what messages call such a server.
        module: what it runs.
        pool: the run's engines; the servers are told of every change.
        host: address that they bind.
        key: of the run.
    """

    def __init__(self, args: Any, pool: EnginePool, host: str, *, title: str, module: str, key: str) -> None:
        self.args, self.pool, self.host = args, pool, host
        self.title, self._module, self._key = title, module, key
        self.servers: list[ServerProcess] = []
        self._http: aiohttp.ClientSession | None = None
        self._watcher: asyncio.Task | None = None
        self._changed = asyncio.Event()

    @property
    def restarts(self) -> int:
        return sum(server.restarts for server in self.servers)

    # ---- life ------------------------------------------------------------------------------------------------------

    def launch(self, name: str, port: int, config: Any) -> ServerProcess:
        """Start a process with a configuration (a dataclass); 0 for any port. Raises: OSError for a port that is taken."""
        folder = Path(self.args.run_dir) / "servers"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.json"
        path.touch(mode=0o600)
        path.write_text(json.dumps(dataclasses.asdict(config)), encoding="utf-8")
        listener = reserve_port(self.host, port)
        server = ServerProcess(name, listener.getsockname()[1], path, log_path(self.args.run_dir, name))
        self._spawn(server, listener)
        self.servers.append(server)
        return server

    async def start(self) -> None:
        """Wait until all answer, and tell them of the engines. Raises: ServerStartError with the log of one that does not start."""
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_CALL_TIMEOUT_S))
        await asyncio.gather(*(self._wait_ready(server) for server in self.servers))
        self.pool.on_membership = self._changed.set
        await self.sync()
        self._watcher = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        for server in self.servers:
            if server.process is not None:
                await asyncio.to_thread(terminate, server.process)
            server.config_path.unlink(missing_ok=True)
        if self._http is not None:
            await self._http.close()

    async def sync(self) -> None:
        """Return when every living server knows the engines that serve now."""
        await asyncio.gather(*(self._tell(server) for server in self.servers))

    def _spawn(self, server: ServerProcess, listener: socket.socket) -> None:
        """Start the process on a port that is bound here and handed over open."""
        try:
            command = [sys.executable, "-m", self._module]
            command += ["--config", str(server.config_path), "--fd", str(listener.fileno())]
            env = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
            server.process = spawn(command, log_path=server.log_path, env=env, pass_fds=[listener.fileno()])
            server.engines = None
        finally:
            listener.close()

    async def _wait_ready(self, server: ServerProcess) -> None:
        deadline = time.monotonic() + self.args.engine_start_timeout
        what = f"the {self.title} on port {server.port}"
        while time.monotonic() < deadline:
            assert server.process is not None
            if (code := server.process.poll()) is not None:
                raise ServerStartError(
                    f"{what} ended with {code} before it was ready; its last lines:\n{tail(server.log_path)}"
                )
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                await self._call("GET", server, "/health", timeout_s=1.0)
                return
            await asyncio.sleep(0.05)
        raise ServerStartError(
            f"{what} was not ready within {self.args.engine_start_timeout:g} s (--engine-start-timeout); "
            f"its last lines:\n{tail(server.log_path)}"
        )

    async def _watch(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _TICK_S)
            self._changed.clear()
            for server in self.servers:
                try:
                    await self._look_after(server)
                except Exception:
                    logger.exception("looking after the %s on port %d", self.title, server.port)

    async def _look_after(self, server: ServerProcess) -> None:
        if server.process is not None and (code := server.process.poll()) is not None:
            logger.error("the %s on port %d ended with %s and is restarted", self.title, server.port, code)
            server.restarts += 1
            self._spawn(server, reserve_port(self.host, server.port))
            await self._wait_ready(server)
        await self._tell(server)

    # ---- engines ---------------------------------------------------------------------------------------------------

    async def _tell(self, server: ServerProcess) -> None:
        engines = {
            index: EngineAddress(client.base_url, client.dp_ranks)
            for index in self.pool.healthy()
            if (client := self.pool.client(index))
        }
        if engines == server.engines and time.monotonic() - server.told_at < _REPEAT_S:
            return
        try:
            await self._call("PUT", server, "/engines", json={i: dataclasses.asdict(e) for i, e in engines.items()})
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            logger.warning("the %s on port %d was not told of the engines: %s", self.title, server.port, error)
            server.engines = None
        else:
            server.engines, server.told_at = engines, time.monotonic()

    async def _call(
        self, method: str, server: ServerProcess, path: str, timeout_s: float = _CALL_TIMEOUT_S, **body: Any
    ) -> None:
        assert self._http is not None
        async with self._http.request(
            method,
            f"http://{self.host}:{server.port}{path}",
            headers={"authorization": f"Bearer {self._key}"},
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            **body,
        ) as reply:
            reply.raise_for_status()
