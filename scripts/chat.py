"""Open a Hugging Face directory, an export of a run for instance, in an engine, and talk to it.

    python scripts/chat.py MODEL "What is 2 + 3?"                  # one answer
    python scripts/chat.py MODEL                                   # a conversation; Ctrl-D ends it
    python scripts/chat.py MODEL --engine sglang --sglang-python .venv-sglang/bin/python

The engine serves the same API that a run uses, through the same client. It ends with this script.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from miles.backends.engine_api.client import EngineClient
from miles.backends.engine_api.errors import EngineError, EngineStartError
from miles.backends.engine_api.launcher import EngineProcess, load_launcher, wait_ready
from miles.utils.process import terminate


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Hugging Face directory with weights and tokenizer")
    parser.add_argument("prompt", nargs="?", help="one message; without it, messages are read from standard input")
    parser.add_argument("--engine", default="embedded", help="embedded, sglang, or an import path (default: embedded)")
    parser.add_argument("--sglang-python", help="interpreter of the environment that has SGLang")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the engine runs (default: cpu)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest tokens (default)")
    parser.add_argument("--max-tokens", type=int, default=256, help="longest answer, in tokens (default: 256)")
    parser.add_argument("--start-timeout", type=float, default=300.0, help="seconds that the engine may take to start")
    return parser


def start(options: argparse.Namespace, folder: Path) -> EngineProcess:
    args = Namespace(train_device=options.device, sglang_python=options.sglang_python)
    return load_launcher(options.engine)(
        args,
        index=0,
        host="127.0.0.1",
        port=0,
        admin_key=secrets.token_hex(16),
        model_path=str(options.model),
        log_path=folder / "engine.log",
        weight_version=0,
    )


def messages_of(options: argparse.Namespace) -> Iterator[str]:
    if options.prompt is not None:
        yield options.prompt
        return
    while True:
        try:
            message = input("you: ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if message:
            yield message


async def talk(options: argparse.Namespace, engine: EngineProcess) -> None:
    """Send each message with the conversation before it, and print what comes back."""
    async with EngineClient(engine.url) as client:
        await wait_ready(client, engine, options.start_timeout)
        conversation: list[dict[str, Any]] = []
        for message in messages_of(options):
            conversation.append({"role": "user", "content": message})
            body = {"messages": conversation, "temperature": options.temperature, "max_tokens": options.max_tokens}
            answer = await client.post(
                "/v1/chat/completions", body | {"model": "default"}, timeout_s=600.0, admin=False
            )
            text = answer["choices"][0]["message"]["content"] or ""
            conversation.append({"role": "assistant", "content": text})
            print(text if options.prompt is not None else f"model: {text}", flush=True)


def main(argv: list[str] | None = None) -> int:
    options = build_parser().parse_intermixed_args(argv)
    if not (options.model / "config.json").is_file():
        print(f"{options.model} is no Hugging Face directory: it has no config.json", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="miles-chat-") as folder:
        try:
            engine = start(options, Path(folder))
        except (EngineStartError, ValueError) as error:
            print(error, file=sys.stderr)
            return 2
        try:
            asyncio.run(talk(options, engine))
        except (EngineError, EngineStartError) as error:
            print(error, file=sys.stderr)
            return 1
        finally:
            terminate(engine.process)
    return 0


if __name__ == "__main__":
    sys.exit(main())
