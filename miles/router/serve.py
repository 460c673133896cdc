"""The router process: `python -m miles.router.serve --config FILE --fd N`."""

from __future__ import annotations

import argparse
import json
import logging
import socket
from pathlib import Path

import uvicorn

from miles.router.app import RouterConfig, create_app
from miles.utils.process_logging import FORMAT

_LEAVE_S = 3


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Routes generations over a run's engines; the rollout manager starts it."
    )
    parser.add_argument("--config", required=True, help="JSON file with a RouterConfig")
    parser.add_argument("--fd", type=int, required=True, help="a listening socket that this process inherits")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format=FORMAT)
    config = RouterConfig(**json.loads(Path(options.config).read_text(encoding="utf-8")))
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(config), log_level="warning", access_log=False, timeout_graceful_shutdown=_LEAVE_S, ws="none"
        )
    )
    server.run(sockets=[socket.socket(fileno=options.fd)])


if __name__ == "__main__":
    main()
