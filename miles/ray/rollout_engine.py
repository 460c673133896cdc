"""The Ray actor beside one engine server: starts the process, watches it, ends it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import ray

from miles.backends.engine_api.launcher import EngineProcess, wait_ready
from miles.utils.process import tail, terminate
from miles.utils.process_logging import log_path, redirect_to_log


class RolloutEngine:
    """Owns one engine server process. A plain synchronous actor: the process is tied to its main thread's life."""

    def __init__(self, args: Any, index: int, admin_key: str) -> None:
        redirect_to_log(args.run_dir, f"engine_{index}_actor")
        self.args, self.index, self.admin_key = args, index, admin_key
        self.engine: EngineProcess | None = None

    def start(self, incarnation: int, weight_version: int) -> str:
        """Launch the server and wait until it answers. Returns its url. Raises with the log's tail if it dies."""
        from miles.backends.engine_api.client import EngineClient
        from miles.backends.engine_api.launcher import load_launcher

        launch = load_launcher(self.args.rollout_engine)
        self.engine = engine = launch(
            self.args,
            index=self.index,
            host=ray.util.get_node_ip_address(),
            port=0,
            admin_key=self.admin_key,
            model_path=self.args.hf_checkpoint,
            log_path=self._log_path(incarnation),
            weight_version=weight_version,
        )

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
        return log_path(self.args.run_dir, f"engine_{self.index}{suffix}")


RemoteRolloutEngine: Any = ray.remote(max_restarts=0)(RolloutEngine)
