"""A session server process: `python -m miles.rollout.session.serve --config FILE --fd N`."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import socket
from pathlib import Path
from types import SimpleNamespace

import uvicorn
from starlette.applications import Starlette

from miles.rollout.prompts import load_tokenizer, model_config
from miles.rollout.session.app import Service, create_app
from miles.rollout.session.collect import Collector
from miles.rollout.session.config import SessionConfig
from miles.rollout.session.history import History, new_history
from miles.rollout.session.store import SessionStore
from miles.rollout.session.turns import Recorder
from miles.rollout.session.upstream import Engines, Upstream
from miles.rollout.session.wal import SessionLog
from miles.rollout.tito.boundary import TitoTokenizer
from miles.rollout.tito.families import family_of
from miles.rollout.tito.matchers import resolve_matcher
from miles.utils.process_logging import FORMAT

_LEAVE_S = 3


def load_tito(config: SessionConfig) -> TitoTokenizer:
    """The run's tokenizer under its family. Raises: ValueError when template and family do not fit."""
    return TitoTokenizer(
        load_tokenizer(config), family_of(config.tito_model), config.template_kwargs, eos_ids(config.hf_checkpoint)
    )


def eos_ids(hf_checkpoint: str) -> list[int]:
    """Tokens at which engines stop by themselves: those of generation_config.json, else of config.json."""
    file = Path(hf_checkpoint) / "generation_config.json"
    value = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
    if value is None:
        value = model_config(SimpleNamespace(hf_checkpoint=hf_checkpoint)).get("eos_token_id")
    return [value] if isinstance(value, int) else list(value or ())


def build_service(config: SessionConfig, tito: TitoTokenizer, upstream: Upstream | None = None) -> Service:
    """A server's parts, with the sessions that its log holds."""
    matcher = resolve_matcher(config.matcher)

    def history() -> History:
        return new_history(config.version, matcher, strict=config.strict_history)

    store = SessionStore(
        history,
        SessionLog(config.log_dir),
        idle_timeout_s=config.idle_timeout_s,
        max_sessions=config.max_sessions,
        max_bytes=config.max_bytes,
    )
    store.recover()
    engines = upstream or Engines(
        request_timeout_s=config.request_timeout_s,
        recovery_timeout_s=config.recovery_timeout_s,
        key=config.engine_key,
    )
    return Service(config, store, Recorder(config, tito, store, engines), Collector(config, tito), engines)


def run(app: Starlette, listener: socket.socket) -> None:
    # Histories are many small objects that live long and hold no cycles: looking through them again and again costs more
    # than all else that happens between a request and its answer.
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=_LEAVE_S, ws="none")
    )
    server.run(sockets=[listener])


def main() -> None:
    parser = argparse.ArgumentParser(description="A TITO session server; the rollout manager starts it.")
    parser.add_argument("--config", required=True, help="JSON file with a SessionConfig")
    parser.add_argument("--fd", type=int, required=True, help="a listening socket that this process inherits")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format=FORMAT)
    config = SessionConfig(**json.loads(Path(options.config).read_text(encoding="utf-8")))
    run(create_app(build_service(config, load_tito(config))), socket.socket(fileno=options.fd))


if __name__ == "__main__":
    main()
