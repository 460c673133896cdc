"""A small honest engine server over HTTP that can be told to misbehave; in a thread, or as a process of its own.

Faults, by call path without the slash: "500", "503", "hang", "die", "refuse" (success: false), "404"; and for
update_weights_from_distributed also "ack" (receive, do not load), "drop" (lose the first tensor), "flip" (one byte wrong),
"absent" (never take part in the broadcast), "die_inside" (die between request and broadcast).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
import urllib.request

import orjson
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from miles.utils.digest import tensor_digest
from miles.utils.process import reserve_port, spawn, terminate
from miles.utils.process_group import join_group, leave_group
from miles.weight_update.types import EngineEndpoint


class FakeEngine:
    def __init__(self, admin_key: str = "key") -> None:
        self.admin_key = admin_key
        self.weights: dict[str, torch.Tensor] = {}
        self.version, self.paused, self.session = "default", False, False
        self.calls: list[str] = []
        self.bodies: dict[str, dict] = {}
        self.faults: dict[str, str] = {}
        self.groups: dict = {}

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/{path:path}", self.handle, methods=["GET", "POST"])])

    async def handle(self, request: Request) -> Response:
        path = request.path_params["path"]
        if path == "_reset":
            self.__init__(self.admin_key)
            return JSONResponse({})
        if path == "_faults":
            self.faults = orjson.loads(await request.body())
            return JSONResponse({})
        if path == "_state":
            state = dict(version=self.version, paused=self.paused, session=self.session, calls=self.calls)
            return JSONResponse(state)
        if path != "generate" and request.headers.get("Authorization") != f"Bearer {self.admin_key}":
            return JSONResponse({"error": {"message": "unauthorized"}}, 401)
        self.calls.append(path)
        body = orjson.loads(await request.body() or b"{}")
        self.bodies[path] = body
        fault = self.faults.get(path)
        if fault in ("500", "503", "404"):
            return JSONResponse({"detail": "told to"}, int(fault))
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault == "die":
            os._exit(9)
        if fault == "refuse":
            return JSONResponse({"success": False, "message": "told to refuse"}, 400)
        return await getattr(self, f"do_{path}")(body)

    async def do_generate(self, body: dict) -> Response:
        return JSONResponse({"text": "", "output_ids": [], "meta_info": {"weight_version": self.version}})

    async def do_health(self, body: dict) -> Response:
        return PlainTextResponse("")

    async def do_model_info(self, body: dict) -> Response:
        return JSONResponse({"weight_version": self.version})

    async def do_pause_generation(self, body: dict) -> Response:
        self.paused = True
        return JSONResponse({"status": "ok"})

    async def do_continue_generation(self, body: dict) -> Response:
        self.paused = False
        return JSONResponse({"status": "ok"})

    async def do_flush_cache(self, body: dict) -> Response:
        return PlainTextResponse("Cache flushed.")

    async def do_begin_weight_update(self, body: dict) -> Response:
        if self.session:
            return JSONResponse({"success": False, "message": "already open"}, 400)
        self.session = True
        return JSONResponse({"success": True, "message": ""})

    async def do_end_weight_update(self, body: dict) -> Response:
        self.session = False
        return JSONResponse({"success": True, "message": ""})

    async def do_update_weight_version(self, body: dict) -> Response:
        self.version = body["new_version"]
        return JSONResponse({"success": True, "message": "", "new_version": self.version})

    async def do_weights_checker(self, body: dict) -> Response:
        if body["action"] == "reset_tensors":
            for tensor in self.weights.values():
                if self.faults.get("noise") != "none":
                    tensor.copy_(torch.rand(tensor.shape))
            return JSONResponse({"success": True, "message": ""})
        checksums = {name: tensor_digest(tensor) for name, tensor in self.weights.items()}
        return JSONResponse({"success": True, "message": "", "ranks": [{"checksums": checksums}]})

    async def do_init_weights_update_group(self, body: dict) -> Response:
        def join():
            return join_group(
                body["master_address"], body["master_port"], body["rank_offset"], body["world_size"],
                body["group_name"], body["backend"], 30,
            )  # fmt: skip

        self.groups[body["group_name"]] = await asyncio.to_thread(join)
        return JSONResponse({"success": True, "message": ""})

    async def do_destroy_weights_update_group(self, body: dict) -> Response:
        leave_group(self.groups.pop(body["group_name"]))
        return JSONResponse({"success": True, "message": ""})

    async def do_update_weights_from_distributed(self, body: dict) -> Response:
        fault = self.faults.get("update_weights_from_distributed")
        if fault == "die_inside":
            os._exit(9)
        if fault == "absent":
            await asyncio.sleep(3600)
        assert body["load_format"] == "flattened_bucket" and body["flush_cache"] is False
        dtypes = [getattr(torch, d) for d in body["dtypes"]]
        sizes = [torch.Size(s).numel() * d.itemsize for s, d in zip(body["shapes"], dtypes, strict=True)]
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        group = self.groups[body["group_name"]]
        await asyncio.to_thread(torch.distributed.broadcast, flat, 0, group)
        parts = [
            (n, p.view(d).reshape(s).clone())
            for n, d, s, p in zip(body["names"], dtypes, body["shapes"], flat.split(sizes), strict=True)
        ]
        if fault == "drop":
            parts = parts[1:]
        if fault == "flip":
            parts[0][1].view(-1).view(torch.uint8)[0] ^= 1
        if fault != "ack":
            self.weights.update(parts)
        return JSONResponse({"success": True, "message": ""})


@contextlib.contextmanager
def in_thread(engine: FakeEngine):
    """Serve `engine` from this process; yields its url."""
    listener = reserve_port()
    server = uvicorn.Server(uvicorn.Config(engine.app(), log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(5)
        listener.close()


class EngineHandle:
    """A fake engine in its own process."""

    def __init__(self, index: int, log_dir) -> None:
        self.index, self.log = index, log_dir / f"engine_{index}.log"
        listener = reserve_port()
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.fast.weight_update.fake_engine", str(listener.fileno())]
        self.process: subprocess.Popen = spawn(command, log_path=self.log, env=env, pass_fds=[listener.fileno()])
        listener.close()

    def endpoint(self) -> EngineEndpoint:
        return EngineEndpoint(self.index, self.url, "key", 1, 0)

    def reset(self) -> None:
        """As freshly started; waits until it is up."""
        self._call("_reset", {})

    def faults(self, **faults: str) -> None:
        self._call("_faults", faults)

    def state(self) -> dict:
        return self._call("_state", {})

    def _call(self, path: str, body: dict):
        request = urllib.request.Request(f"{self.url}/{path}", orjson.dumps(body), method="POST")
        with urllib.request.urlopen(request, timeout=30) as reply:
            return orjson.loads(reply.read())

    def stop(self) -> None:
        terminate(self.process, grace_s=0.1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    server = uvicorn.Server(uvicorn.Config(FakeEngine().app(), log_level="info"))
    server.run(sockets=[socket.socket(fileno=int(sys.argv[1]))])
