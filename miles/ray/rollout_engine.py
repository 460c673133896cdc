"""The Ray actor beside one engine server: starts the process, watches it, ends it."""

from __future__ import annotations

import asyncio
import copy
import socket
from pathlib import Path
from typing import Any

import ray

from miles.backends.engine_api.launcher import EngineProcess, wait_ready
from miles.utils.process import hold_ports, tail, terminate
from miles.utils.process_logging import log_path, redirect_to_log

MEETING_PORTS = 16  # SGLang takes several above the one that it is told


class RolloutEngine:
    """Owns one engine server process. A plain synchronous actor: the process is tied to its main thread's life.

    An engine that spans nodes has one such actor on each; that of `node_rank` 0 runs the server that is addressed.
    """

    def __init__(
        self, args: Any, index: int, admin_key: str, node_rank: int = 0, gpu_ids: list[int] | None = None
    ) -> None:
        self.name = f"engine_{index}" + (f"_node{node_rank}" if node_rank else "")
        redirect_to_log(args.run_dir, f"{self.name}_actor")
        self.args, self.index, self.admin_key = args, index, admin_key
        self.node_rank, self.gpu_ids = node_rank, gpu_ids
        self.engine: EngineProcess | None = None
        self._meeting: list[socket.socket] = []

    def reserve_meeting(self) -> str:
        """An address where the nodes' ranks can meet. It and the ports above it are held until the server is up."""
        host = ray.util.get_node_ip_address()
        self._meeting = hold_ports(host, MEETING_PORTS)
        return f"{host}:{self._meeting[0].getsockname()[1]}"

    def start(self, incarnation: int, weight_version: int, meeting: str | None = None) -> str:
        """Launch the server and wait until it answers. Returns its url. Raises with the log's tail if it dies."""
        try:
            return self._start(incarnation, weight_version, meeting)
        finally:
            while self._meeting:
                self._meeting.pop().close()

    def _start(self, incarnation: int, weight_version: int, meeting: str | None) -> str:
        from miles.backends.engine_api.client import EngineClient
        from miles.backends.engine_api.launcher import load_launcher

        launch = load_launcher(self.args.rollout_engine)
        args = copy.copy(self.args)
        if meeting is not None:
            args.sglang_dist_init_addr, args.sglang_node_rank = meeting, self.node_rank
            args.sglang_nnodes = max(args.rollout_num_gpus_per_engine // args.num_gpus_per_node, 1)
        self.engine = engine = launch(
            args,
            index=self.index,
            host=ray.util.get_node_ip_address(),
            port=0,
            admin_key=self.admin_key,
            model_path=self.args.hf_checkpoint,
            log_path=self._log_path(incarnation),
            weight_version=weight_version,
            gpu_ids=self.gpu_ids,
        )
        if self.node_rank:
            return engine.url  # it has no server to ask; the first node's answers when all are there

        async def ready() -> None:
            client = EngineClient(engine.url, admin_key=self.admin_key)
            try:
                await wait_ready(client, engine, self.args.engine_start_timeout)
            finally:
                await client.close()

        asyncio.run(ready())
        return engine.url

    def poll(self) -> int | None:
        """The server's exit code, None while it runs."""
        return self.engine.process.poll() if self.engine is not None else -1

    def pid(self) -> int | None:
        return self.engine.process.pid if self.engine is not None else None

    def last_lines(self) -> str:
        return tail(self.engine.log_path) if self.engine is not None else ""

    def stop(self) -> None:
        if self.engine is not None:
            terminate(self.engine.process)
            self.engine = None

    def _log_path(self, incarnation: int) -> Path:
        suffix = f"_restart{incarnation}" if incarnation else ""
        return log_path(self.args.run_dir, f"{self.name}{suffix}")


RemoteRolloutEngine: Any = ray.remote(max_restarts=0)(RolloutEngine)
