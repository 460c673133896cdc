"""The embedded engine as a process: `python -m miles.backends.embedded_engine.server --model-path DIR`."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import uvicorn
import uvloop

from miles.backends.embedded_engine.engine import Engine
from miles.backends.embedded_engine.faults import FAULTS, Faults
from miles.backends.embedded_engine.forward import Model
from miles.backends.embedded_engine.generate_api import EngineFacts
from miles.backends.embedded_engine.http_app import Service, create_app
from miles.backends.embedded_engine.kv_cache import PAGE, page_bytes
from miles.backends.embedded_engine.model_config import ARCHITECTURES, ModelConfig, ModelError, load_model_config
from miles.backends.embedded_engine.scheduler import Scheduler, SchedulerLimits
from miles.backends.embedded_engine.weight_sync import WeightSync
from miles.backends.embedded_engine.weights import WeightError, Weights, load_directory
from miles.utils.process import reserve_port

logger = logging.getLogger(__name__)
_EXIT_GRACE_S = 1.0
_CPU_CACHE_SHARE, _GPU_CACHE_SHARE = 0.25, 0.8


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m miles.backends.embedded_engine.server",
        description="Serve a Hugging Face causal LM directory (Llama, Qwen2, Qwen3, Qwen3-MoE) over SGLang's HTTP API.",
        epilog='Try: curl URL/generate -H "Content-Type: application/json" -d \'{"text": "Hello", "sampling_params": {"max_new_tokens": 16}}\'',
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model-path", required=True, help="directory with config.json, *.safetensors and (for text) a tokenizer")
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=30000, help="port to listen on; 0 takes a free one")
    add("--fd", type=int, help="serve on this inherited listening socket instead of --host and --port")
    add("--api-key", help="key that every call must carry as 'Authorization: Bearer KEY'")
    add("--admin-api-key", help="key that control calls (pause, abort, weights, memory) must carry instead")
    add("--served-model-name", help="name in /v1/models; the directory's name when not given")
    add("--weight-version", default="default", help="version that the first weights are reported as")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: CUDA where there is one")
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto",
        help="type of the weights; auto takes the model's on a GPU and float32 on a CPU")  # fmt: skip
    add("--num-threads", type=int, default=1, help="CPU threads of the forward pass")
    add("--max-running-requests", type=int, default=64, help="requests decoded together; more wait")
    add("--max-total-tokens", type=int, help="tokens that the KV cache holds; from free memory when not given")
    add("--chunked-prefill-size", type=int, default=1024, help="most prompt tokens computed in one step")
    add("--disable-radix-cache", action="store_true", help="never reuse the cache of a common prefix")
    add("--enable-weights-cpu-backup", action="store_true",
        help="keep a copy of the weights while their memory is released, and restore it on resume")  # fmt: skip
    add("--weight-update-timeout", type=float, default=300.0, help="deadline in seconds for joining a weight update group "
        "and for each of its transfers")  # fmt: skip
    add("--stuck-timeout", type=float, default=120.0,
        help="seconds that one step may take before /health answers 503")  # fmt: skip
    add("--log-level", default="warning", choices=("debug", "info", "warning", "error"), help="what to log")
    faults = "; ".join(f"{name}: {text}" for name, text in FAULTS.items())
    add(
        "--fault",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help=f"misbehave on purpose, for tests ({faults})",
    )
    return parser


def choose_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError("--device cuda: torch sees no CUDA device; use --device cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def choose_dtype(name: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else config.dtype
    return getattr(torch, name)


def cache_tokens(config: ModelConfig, device: torch.device, dtype: torch.dtype, max_running: int) -> int:
    """Size of the cache when none is given: a share of the free memory, but no more than could be used."""
    if device.type == "cuda":
        budget = torch.cuda.mem_get_info(device)[0] * _GPU_CACHE_SHARE
    else:
        budget = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * _CPU_CACHE_SHARE
    pages = int(budget // page_bytes(config, dtype))
    wanted = 2 * max_running * -(-config.context_length // PAGE)
    return max(1, min(pages, wanted)) * PAGE


def load_tokenizer(path: str) -> Any:
    """The directory's tokenizer, or None when it has none (then only token ids can be sent)."""
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    if not any((Path(path) / name).exists() for name in names):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, local_files_only=True)


def build_service(args: argparse.Namespace) -> Service:
    """Load the model and start the engine thread. Raises: ModelError, WeightError, ValueError for bad input."""
    if args.max_running_requests < 1 or args.chunked_prefill_size < 1 or args.num_threads < 1:
        raise ValueError("--max-running-requests, --chunked-prefill-size and --num-threads must be at least 1")
    faults = Faults.parse(args.fault)
    torch.set_num_threads(args.num_threads)
    config = load_model_config(args.model_path)
    device = choose_device(args.device)
    dtype = choose_dtype(args.dtype, config, device)
    weights = Weights(config, device, dtype)
    load_directory(weights, args.model_path)
    tokenizer = load_tokenizer(args.model_path)
    total = args.max_total_tokens or cache_tokens(config, device, dtype, args.max_running_requests)
    limits = SchedulerLimits(args.max_running_requests, total, args.chunked_prefill_size, not args.disable_radix_cache)
    scheduler = Scheduler(Model(config, weights), limits)
    scheduler.weight_version = args.weight_version
    engine = Engine(scheduler, faults, on_death=lambda _: _exit_soon(1))
    eos = set(config.eos_token_ids)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        eos.add(tokenizer.eos_token_id)
    facts = EngineFacts(config, tokenizer, frozenset(eos), (scheduler.pool.pages - 1) * PAGE)
    info = {k: v for k, v in vars(args).items() if k not in ("api_key", "admin_api_key")}
    info |= {
        "served_model_name": args.served_model_name or Path(args.model_path).resolve().name,
        "architectures": [name for name, kind in ARCHITECTURES.items() if kind == config.architecture],
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "engine": "embedded",
        "pid": os.getpid(),
    }
    service = Service(engine, WeightSync(engine, args.model_path), facts, info, args.api_key, args.admin_api_key)
    engine.start()
    return service


def _exit_soon(code: int) -> None:
    """Leave after a moment in which answers still go out."""

    def leave() -> None:
        time.sleep(_EXIT_GRACE_S)
        os._exit(code)

    threading.Thread(target=leave, daemon=True).start()


class _Server(uvicorn.Server):
    """uvicorn that announces itself, and leaves within seconds whatever is still in flight."""

    url = ""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(f"embedded engine ready at {self.url} (pid {os.getpid()})", flush=True)

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.should_exit = self.force_exit = True
        _exit_soon(0)


def serve(service: Service, sock: socket.socket, log_level: str) -> None:
    config = uvicorn.Config(
        create_app(service),
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="off",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        log_level=log_level,
        timeout_keep_alive=60,
        backlog=2048,
    )
    server = _Server(config)
    host, port = sock.getsockname()[:2]
    server.url = f"http://{host}:{port}"
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(server.serve(sockets=[sock]))


def main(argv: list[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # until the server takes over
    try:
        sock = socket.socket(fileno=args.fd) if args.fd is not None else reserve_port(args.host, args.port)
        service = build_service(args)
    except (ModelError, WeightError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    gc.collect()
    gc.freeze()  # what was imported and loaded stays: no need to look through it again
    sys.setswitchinterval(0.001)  # the HTTP thread and the engine thread share one interpreter
    serve(service, sock, args.log_level)
    os._exit(0)


if __name__ == "__main__":
    main()
