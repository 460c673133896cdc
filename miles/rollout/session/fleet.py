"""The run's session servers, seen from the rollout manager: started, told of the engines, watched, restarted, ended."""

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

from miles.rollout.session.config import SessionConfig
from miles.rollout.session.upstream import EngineAddress
from miles.router.engine_pool import EnginePool
from miles.utils.process import reserve_port, spawn, tail, terminate
from miles.utils.process_logging import log_path

logger = logging.getLogger(__name__)

_TICK_S = 0.5
_REPEAT_S = 5.0  # engines that a server took for dead are named to it again
_CALL_TIMEOUT_S = 10.0


class SessionServerError(RuntimeError):
    """A session server that does not start."""


@dataclass
class _Server:
    port: int
    config: SessionConfig
    config_path: Path
    log_path: Path
    process: subprocess.Popen | None = None
    restarts: int = 0
    engines: dict[int, EngineAddress] | None = None
    told_at: float = 0.0


class SessionServers:
    """One process a port. Lives in one event loop.

    Args:
        pool: the run's engines; the servers are told of every change.
        host: address to bind where `--session-server-ip` says nothing.
    """

    def __init__(self, args: Any, pool: EnginePool, host: str) -> None:
        self.args, self.pool = args, pool
        self.host = args.session_server_ip or host
        self.base = SessionConfig.from_args(args)
        self.servers: list[_Server] = []
        self._http: aiohttp.ClientSession | None = None
        self._watcher: asyncio.Task | None = None
        self._changed = asyncio.Event()

    # ---- life ----------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start every server, wait until all answer, and write into the arguments where they are.

        Raises: OSError for a port that is taken, SessionServerError with the log of a server that does not start.
        """
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_CALL_TIMEOUT_S))
        for index, port in enumerate(wanted_ports(self.args)):
            self._launch_new(index, port)
        await asyncio.gather(*(self._wait_ready(server) for server in self.servers))
        self.args.session_server_ip = self.host
        self.args.session_server_ports = [server.port for server in self.servers]
        self.args.session_server_instance_ids = {server.port: server.config.instance_id for server in self.servers}
        self.args.session_server_key = self.base.key
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

    @property
    def restarts(self) -> int:
        return sum(server.restarts for server in self.servers)

    # ---- processes -----------------------------------------------------------------------------------------------------

    def _launch_new(self, index: int, port: int) -> None:
        folder = Path(self.args.run_dir) / "sessions"
        config = dataclasses.replace(
            self.base, instance_id=os.urandom(16).hex(), log_dir=str((folder / f"server_{index}").absolute())
        )
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"server_{index}.json"
        path.touch(mode=0o600)
        path.write_text(json.dumps(dataclasses.asdict(config)), encoding="utf-8")
        listener = reserve_port(self.host, port)
        server = _Server(
            listener.getsockname()[1], config, path, log_path(self.args.run_dir, f"session_server_{index}")
        )
        self._launch(server, listener)
        self.servers.append(server)

    def _launch(self, server: _Server, listener: socket.socket) -> None:
        """Start the process on a port that is bound here and handed over open."""
        try:
            command = [sys.executable, "-m", "miles.rollout.session.serve"]
            command += ["--config", str(server.config_path), "--fd", str(listener.fileno())]
            env = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
            server.process = spawn(command, log_path=server.log_path, env=env, pass_fds=[listener.fileno()])
            server.engines = None
        finally:
            listener.close()

    async def _wait_ready(self, server: _Server) -> None:
        deadline = time.monotonic() + self.args.engine_start_timeout
        while time.monotonic() < deadline:
            assert server.process is not None
            if (code := server.process.poll()) is not None:
                raise SessionServerError(
                    f"the session server on port {server.port} ended with {code} before it was ready; its last lines:\n"
                    + tail(server.log_path)
                )
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                await self._call("GET", server, "/health", timeout_s=1.0)
                return
            await asyncio.sleep(0.05)
        raise SessionServerError(
            f"the session server on port {server.port} was not ready within {self.args.engine_start_timeout:g} s "
            f"(--engine-start-timeout); its last lines:\n{tail(server.log_path)}"
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
                    logger.exception("looking after the session server on port %d", server.port)

    async def _look_after(self, server: _Server) -> None:
        if server.process is not None and (code := server.process.poll()) is not None:
            logger.error("session server on port %d ended with %s and is restarted", server.port, code)
            server.restarts += 1
            self._launch(server, reserve_port(self.host, server.port))
            await self._wait_ready(server)
        await self._tell(server)

    # ---- engines -------------------------------------------------------------------------------------------------------

    async def _tell(self, server: _Server) -> None:
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
            logger.warning("session server on port %d was not told of the engines: %s", server.port, error)
            server.engines = None
        else:
            server.engines, server.told_at = engines, time.monotonic()

    async def _call(
        self, method: str, server: _Server, path: str, timeout_s: float = _CALL_TIMEOUT_S, **body: Any
    ) -> None:
        assert self._http is not None
        async with self._http.request(
            method,
            f"http://{self.host}:{server.port}{path}",
            headers={"authorization": f"Bearer {self.base.key}"},
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            **body,
        ) as reply:
            reply.raise_for_status()


def wanted_ports(args: Any) -> list[int]:
    """`--session-server-port`: none (one server, any port), one port, or a first and an end that is not used."""
    ports = args.session_server_port or [0]
    return list(range(*ports)) if len(ports) == 2 else list(ports)
