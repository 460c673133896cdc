"""The run's session servers, seen from the rollout manager: one process a port."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from miles.rollout.session.config import SessionConfig
from miles.router.engine_pool import EnginePool
from miles.router.servers import PoolServers


class SessionServers(PoolServers):
    """Started with `start`, which writes into the arguments where they are.

    Args:
        host: address to bind where `--session-server-ip` says nothing.
    """

    def __init__(self, args: Any, pool: EnginePool, host: str) -> None:
        self.base = SessionConfig.from_args(args)
        super().__init__(
            args,
            pool,
            args.session_server_ip or host,
            title="session server",
            module="miles.rollout.session.serve",
            key=self.base.key,
        )

    async def start(self) -> None:
        """Raises: OSError for a port that is taken, ServerStartError with the log of a server that does not start."""
        ids = {}
        for index, port in enumerate(wanted_ports(self.args)):
            log = (Path(self.args.run_dir) / "sessions" / f"server_{index}").absolute()
            config = dataclasses.replace(self.base, instance_id=os.urandom(16).hex(), log_dir=str(log))
            ids[self.launch(f"session_server_{index}", port, config).port] = config.instance_id
        await super().start()
        self.args.session_server_ip = self.host
        self.args.session_server_ports = [server.port for server in self.servers]
        self.args.session_server_instance_ids = ids
        self.args.session_server_key = self.base.key


def wanted_ports(args: Any) -> list[int]:
    """`--session-server-port`: none (one server, any port), one port, or a first and an end that is not used."""
    ports = args.session_server_port or [0]
    return list(range(*ports)) if len(ports) == 2 else list(ports)
