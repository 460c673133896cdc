"""What the benchmarks of session servers run against: a tokenizer of real text, an engine that answers at once, a bare proxy.

    python -m tests.benchmarks._session_parts engine|proxy --fd N [--engine URL] [--tokenizer DIR]

The engine parses what it is sent and answers with canned tokens, so what is measured is what stands before it.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import sys
from pathlib import Path
from typing import Any

import orjson

from miles.utils.process import reserve_port, spawn

REPO = Path(__file__).resolve().parents[2]
ANSWER_TOKENS = 96
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(folder: Path, vocabulary: int = 16_000) -> Path:
    """A byte-level BPE with ChatML's template, trained on this repository's own text: about four characters a token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(texts(), trainer)
    special = ["<|im_end|>", "<|im_start|>", "<|endoftext|>"]
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=special[0])
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def texts() -> list[str]:
    files = [*sorted(REPO.glob("docs/**/*.md")), *sorted(REPO.glob("miles/rollout/**/*.py"))]
    return [file.read_text(encoding="utf-8") for file in files]


def words_of(rng: random.Random, source: str, characters: int) -> str:
    start = rng.randrange(max(len(source) - characters, 1))
    return source[start : start + characters]


# ---- the engine --------------------------------------------------------------------------------------------------------


def canned_answers(tokenizer_dir: str) -> tuple[bytes, bytes]:
    """The same generation as `/generate` and as a chat completion tell it."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    text = words_of(random.Random(1), "\n".join(texts()), 2000)
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"][: ANSWER_TOKENS - 1], tokenizer.eos_token_id]
    meta = {
        "id": "x", "finish_reason": {"type": "stop", "matched": ids[-1]}, "completion_tokens": len(ids), "cached_tokens": 7,
        "weight_version": "1", "e2e_latency": 0.1,
        "output_token_logprobs": [[-0.1234567 - i / 1000, token, None] for i, token in enumerate(ids)],
    }  # fmt: skip
    said = tokenizer.decode(ids[:-1])
    choice = {"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop", "meta_info": meta}
    chat = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    return orjson.dumps({"text": said, "output_ids": ids, "meta_info": meta}), orjson.dumps(chat)


def engine_app(tokenizer_dir: str) -> Any:
    native, chat = canned_answers(tokenizer_dir)

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        await _body(receive)
        await _answer(send, native if scope["path"] == "/generate" else chat)

    return app


async def _body(receive: Any) -> bytes:
    parts = []
    while True:
        event = await receive()
        parts.append(event.get("body", b""))
        if not event.get("more_body"):
            return b"".join(parts)


async def _answer(send: Any, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


# ---- the proxy ---------------------------------------------------------------------------------------------------------


def proxy_app(engine: str) -> Any:
    """Parses a chat completion's body, sends it on, parses the answer and gives it back: what no server can do without."""
    import aiohttp
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    sessions: list[aiohttp.ClientSession] = []

    async def forward(http: Request) -> Response:
        if not sessions:
            sessions.append(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), read_bufsize=1 << 20))
        body = orjson.loads(await http.body())
        headers = {"content-type": "application/json"}
        async with sessions[0].post(engine + "/v1/chat/completions", data=orjson.dumps(body), headers=headers) as reply:
            answer = orjson.loads(await reply.read())
        return Response(orjson.dumps(answer), media_type="application/json")

    return Starlette(routes=[Route("/v1/chat/completions", forward, methods=["POST"])])


# ---- processes ---------------------------------------------------------------------------------------------------------


def start(module: str, log: Path, *options: str) -> tuple[Any, str]:
    """A process that serves on a socket which it inherits, and its address."""
    listener = reserve_port("127.0.0.1", 0)
    command = [sys.executable, "-m", module, *options, "--fd", str(listener.fileno())]
    path = os.pathsep.join(filter(None, (str(REPO), os.environ.get("PYTHONPATH"))))
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    process = spawn(command, log_path=log, env=env, pass_fds=[listener.fileno()])
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.close()
    return process, url


def main() -> None:
    import uvicorn

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("engine", "proxy"))
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--engine")
    parser.add_argument("--tokenizer")
    options = parser.parse_args()
    app = engine_app(options.tokenizer) if options.part == "engine" else proxy_app(options.engine)
    config = uvicorn.Config(app, log_level="warning", access_log=False, ws="none", lifespan="off")
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=options.fd)])


if __name__ == "__main__":
    main()
