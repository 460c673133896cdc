"""Control endpoints: pause, abort, flush, weights, versions, memory, checker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from miles.backends.embedded_engine.engine import PAUSE_MODES
from miles.backends.embedded_engine.http_app import Service, disconnected, error_reply, guarded, json_body, reply
from miles.backends.embedded_engine.model_config import ModelError
from miles.backends.embedded_engine.payloads import decode_tensors
from miles.backends.embedded_engine.sampling_params import RequestError
from miles.backends.embedded_engine.weight_sync import parse_specs
from miles.backends.embedded_engine.weights import WeightError
from miles.utils.process_group import GroupJoinError, join_group, leave_group

logger = logging.getLogger(__name__)
TAGS = {"weights", "kv_cache", "cuda_graph"}
Action = Callable[[Service, dict[str, Any]], Coroutine[Any, Any, Any]]
# Receiving blocks on the sender, so it gets threads of its own: as many as groups that may be in use at once.
_receivers = ThreadPoolExecutor(max_workers=8, thread_name_prefix="weights")


def control_routes(service: Service) -> list[Route]:
    actions: dict[str, Action] = {
        "/abort_request": abort_request,
        "/pause_generation": pause_generation,
        "/continue_generation": continue_generation,
        "/begin_weight_update": begin_weight_update,
        "/end_weight_update": end_weight_update,
        "/init_weights_update_group": init_weights_update_group,
        "/destroy_weights_update_group": destroy_weights_update_group,
        "/update_weights_from_distributed": update_weights_from_distributed,
        "/update_weights_from_tensor": update_weights_from_tensor,
        "/update_weights_from_disk": update_weights_from_disk,
        "/update_weight_version": update_weight_version,
        "/weights_checker": weights_checker,
        "/release_memory_occupation": release_memory_occupation,
        "/resume_memory_occupation": resume_memory_occupation,
        "/get_weights_by_name": get_weights_by_name,
    }
    routes = [Route("/flush_cache", guarded(service, _flush(service), admin=True), methods=["GET", "POST"])]
    for path, action in actions.items():
        handler = guarded(service, _endpoint(service, action), admin=True)
        routes.append(Route(path, handler, methods=["POST", "GET"]))
    return routes


def _endpoint(service: Service, action: Action) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def handler(http: HttpRequest) -> Response:
        try:
            body = await json_body(http)
            if body is not None and not isinstance(body, dict):
                raise RequestError("the body must be a JSON object")
            return await _unless_client_leaves(http, action(service, body or {}))
        except (WeightError, ModelError, RequestError, GroupJoinError) as error:
            return reply({"success": False, "message": str(error)}, 400)
        except KeyError as error:
            return reply({"success": False, "message": f"the field {error} is missing"}, 400)

    return handler


async def _unless_client_leaves(http: HttpRequest, work: Coroutine[Any, Any, Any]) -> Response:
    """The answer of `work`, which is cancelled when nobody waits for it any more.

    So a call that timed out while it waited for requests in flight does not take effect later.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(http))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return reply(task.result())
        logger.warning("%s: the client closed the connection before the answer", http.url.path)
        return error_reply("the client closed the connection", 499)
    finally:
        task.cancel()
        gone.cancel()


async def _run(service: Service, function: Callable[[], Any]) -> Any:
    return await asyncio.wrap_future(service.engine.call(function))


async def _update(service: Service, body: dict[str, Any], function: Callable[[], Any], message: str) -> dict[str, Any]:
    """Run a change of weights when nothing is in flight, then move the version if the request names one."""
    engine = service.engine
    if body.get("abort_all_requests"):
        await _run(service, lambda: engine.abort(abort_all=True))

    def change() -> None:
        function()
        if body.get("weight_version") is not None:
            service.sync.set_version_locked(str(body["weight_version"]))

    change.__name__ = message
    waiting = engine.scheduler.num_requests if engine.paused else 0
    await asyncio.wrap_future(engine.exclusive(change))
    if body.get("weight_version") is not None:
        message += f" Weight version updated to {body['weight_version']}."
    return {"success": True, "message": message, "num_paused_requests": waiting}


# ---- flow --------------------------------------------------------------------------------------------------------


async def abort_request(service: Service, body: dict[str, Any]) -> None:
    """One request (or batch) by `rid`, or all. Unknown ids are no error: the request may just have finished."""
    rid, everything = body.get("rid") or "", bool(body.get("abort_all"))
    await _run(service, lambda: service.engine.abort(rid, everything))


async def pause_generation(service: Service, body: dict[str, Any]) -> dict[str, Any]:
    mode = body.get("mode") or "abort"
    if mode not in PAUSE_MODES:
        raise RequestError(f"mode {mode!r} is not one of {', '.join(PAUSE_MODES)}")
    await _run(service, lambda: service.engine.pause(mode))
    return {"message": f"Generation paused ({mode}).", "status": "ok"}


async def continue_generation(service: Service, body: dict[str, Any]) -> dict[str, Any]:
    await _run(service, service.engine.resume)
    return {"message": "Generation continued.", "status": "ok"}


def _flush(service: Service) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def handler(http: HttpRequest) -> Response:
        deadline = asyncio.get_running_loop().time() + float(http.query_params.get("timeout", 0))
        while True:
            refusal = await _run(service, service.engine.flush)
            if refusal is None:
                return PlainTextResponse("Cache flushed.\n")
            if asyncio.get_running_loop().time() >= deadline:
                return PlainTextResponse(f"Not flushed: {refusal}.\n", 400)
            await asyncio.sleep(0.05)

    return handler


# ---- weights -----------------------------------------------------------------------------------------------------


async def begin_weight_update(service: Service, body: dict[str, Any]) -> dict[str, Any]:
    selector = body.get("selector") or "all"
    await asyncio.wrap_future(service.engine.exclusive(lambda: service.sync.begin_locked(selector)))
    return {"success": True, "message": f"Weight update begun ({selector})."}


async def end_weight_update(service: Service, body: dict[str, Any]) -> dict[str, Any]:
    await _run(service, service.sync.end_locked)
    return {"success": True, "message": "Weight update ended."}


async def init_weights_update_group(service: Service, body: dict[str, Any]) -> dict[str, Any]:
    """Blocks until all ranks have joined, at most --weight-update-timeout seconds."""
    name = body.get("group_name") or "weight_update_group"
    groups = service.sync.groups
    if name in groups:
        raise WeightError(f"weight update group {name!r} exists: destroy it first")
    timeout = service.server_args["weight_update_timeout"]
    device = service.sync.weights.device

    def join() -> None:
        groups[name] = join_group(
            str(body["master_address"]),
            int(body["master_port"]),
            int(body["rank_offset"]),
            int(body["world_size"]),
            name,
            body.get("backend") or "nccl",
            timeout,
            device if device.type == "cuda" else None,
        )

    try:
        await asyncio.get_running_loop().run_in_executor(_receivers, join)
    except ValueError as error:
        raise WeightError(str(error)) from None
    return {"success": True, "message": f"Joined weight update group {name!r}."}


async def destroy_weights_update_group(service: Service, body: dict[str, Any]) -> dict[str, Any]:
    name = body.get("group_name") or "weight_update_group"
    group = service.sync.groups.pop(name, None)
    if group is None:
        raise WeightError(f"no weight update group {name!r}")
    await asyncio.get_running_loop().run_in_executor(_receivers, leave_group, group)
    return {"success": True, "message": f"Left weight update group {name!r}."}


async def update_weights_from_distributed(service: Service, body: dict[str, Any]) -> dict[str, Any]:
    load_format = body.get("load_format")
    if load_format not in (None, "flattened_bucket"):
        raise WeightError(f"load_format {load_format!r} is neither null nor 'flattened_bucket'")
    specs = parse_specs(body["names"], body["dtypes"], body["shapes"])
    group = body.get("group_name") or "weight_update_group"
    # First receive, then judge: a refusal before the broadcast would leave the sender waiting in it.
    tensors = await asyncio.get_running_loop().run_in_executor(
        _receivers, service.sync.receive_distributed, specs, group, load_format == "flattened_bucket"
    )
    message = f"Updated {len(specs)} weights from the group."
    return await _update(service, body, lambda: service.sync.store_locked(tensors), message)


async def update_weights_from_tensor(service: Service, body: dict[str, Any]) -> dict[str, Any]:
    payloads = body["serialized_named_tensors"]
    if isinstance(payloads, str):
        payloads = [payloads]
    if len(payloads) != 1:
        raise WeightError(f"{len(payloads)} payloads for an engine of one rank: give exactly one")
    load_format = body.get("load_format")
    if load_format not in (None, "direct", "flattened_bucket"):
        raise WeightError(f"load_format {load_format!r} is not null, 'direct' or 'flattened_bucket'")
    device = service.sync.weights.device
    tensors = await asyncio.get_running_loop().run_in_executor(
        _receivers, decode_tensors, payloads[0], load_format, device
    )
    message = f"Updated {len(tensors)} weights from tensors."
    return await _update(service, body, lambda: service.sync.store_locked(tensors), message)


async def update_weights_from_disk(service: Service, body: dict[str, Any]) -> dict[str, Any]:
    path = str(body["model_path"])
    return await _update(service, body, lambda: service.sync.load_disk_locked(path), f"Loaded weights from {path}.")


async def update_weight_version(service: Service, body: dict[str, Any]) -> dict[str, Any]:
    version = str(body["new_version"])

    def move() -> None:
        if body.get("abort_all_requests", True):
            service.engine.abort(abort_all=True)
        service.sync.set_version_locked(version)

    await _run(service, move)
    return {"success": True, "message": f"Weight version updated to {version}.", "new_version": version}


async def weights_checker(service: Service, body: dict[str, Any]) -> dict[str, Any]:
    action, skip = body.get("action") or "checksum", body.get("skip_tensor_list") or []
    if body.get("selector") == "draft":
        raise WeightError("selector 'draft': this engine has no draft model")
    run = service.engine.call if action == "checksum" else service.engine.exclusive
    result = await asyncio.wrap_future(run(lambda: service.sync.check_locked(action, skip)))
    return {"success": True} | result


async def get_weights_by_name(service: Service, body: dict[str, Any]) -> list[Any]:
    name = str(body["name"])
    slot = service.sync.weights.find(name)
    if slot is None:
        raise WeightError(f"{name}: the model has no such tensor")
    values = await _run(service, lambda: slot.read().detach().float().cpu())
    return values[: int(body.get("truncate_size") or 100)].tolist()


# ---- memory ------------------------------------------------------------------------------------------------------


def _tags(body: dict[str, Any]) -> set[str]:
    tags = set(body.get("tags") or TAGS)
    if tags - TAGS:
        raise RequestError(f"unknown tags {', '.join(sorted(tags - TAGS))}: there are {', '.join(sorted(TAGS))}")
    return tags


async def release_memory_occupation(service: Service, body: dict[str, Any]) -> None:
    tags, keep = _tags(body), service.server_args["enable_weights_cpu_backup"]
    await asyncio.wrap_future(service.engine.exclusive(lambda: service.sync.release_locked(tags, keep)))


async def resume_memory_occupation(service: Service, body: dict[str, Any]) -> None:
    tags = _tags(body) if body.get("tags") else set(service.engine.released)
    await _run(service, lambda: service.sync.resume_locked(tags))
