"""What a server says about itself: health, model, load."""

from __future__ import annotations

import asyncio

from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response

from miles.backends.embedded_engine.delivery import Outlet
from miles.backends.embedded_engine.generate_api import parse_generate
from miles.backends.embedded_engine.http_app import Handler, Service, forget, reply, run_requests

_PROBE_TIMEOUT_S = 20.0


def health(service: Service) -> Handler:
    """200 while the engine thread lives and is not stuck; generates nothing, so pauses and updates do not matter."""

    async def handler(http: HttpRequest) -> Response:
        engine = service.engine
        if engine.faults.still_starting:
            return PlainTextResponse("starting", 503)
        if engine.death is not None or not engine.thread.is_alive():
            return PlainTextResponse("the engine thread has died", 503)
        seconds, what = engine.stuck_for()
        if seconds > service.server_args["stuck_timeout"]:
            return PlainTextResponse(f"stuck in {what} for {seconds:.0f} s", 503)
        return PlainTextResponse("")

    return handler


def health_generate(service: Service) -> Handler:
    """Generates one token, except while paused or without weights: then the engine thread only has to answer."""
    plain = health(service)

    async def handler(http: HttpRequest) -> Response:
        status = await plain(http)
        if status.status_code != 200:
            return status
        engine = service.engine
        try:
            if engine.paused or engine.update_session or engine.cannot_generate():
                await asyncio.wait_for(asyncio.wrap_future(engine.call(lambda: None)), _PROBE_TIMEOUT_S)
            else:
                outlet = Outlet(asyncio.get_running_loop())
                body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
                call = parse_generate(body, service.facts, outlet.emit)
                await run_requests(service, call.requests, outlet, stream=False)
                try:
                    await asyncio.wait_for(outlet.all_finished(), _PROBE_TIMEOUT_S)
                finally:
                    forget(service, call.requests)
        except TimeoutError:
            return PlainTextResponse(f"no answer within {_PROBE_TIMEOUT_S:g} s", 503)
        return PlainTextResponse("")

    return handler


def model_info(service: Service) -> Handler:
    async def handler(http: HttpRequest) -> Response:
        config = service.facts.config
        return reply(
            {
                "model_path": service.sync.model_path,
                "served_model_name": service.server_args["served_model_name"],
                "tokenizer_path": service.sync.model_path if service.facts.tokenizer is not None else None,
                "is_generation": True,
                "weight_version": service.weight_version,
                "load_format": "auto",
                "model_type": config.architecture,
                "architectures": service.server_args["architectures"],
                "vocab_size": config.vocab_size,
                "context_length": config.context_length,
                "has_image_understanding": False,
                "has_audio_understanding": False,
            }
        )

    return handler


def server_info(service: Service) -> Handler:
    async def handler(http: HttpRequest) -> Response:
        engine, scheduler = service.engine, service.engine.scheduler
        pool = scheduler.pool
        return reply(
            service.server_args
            | {
                "version": "embedded",
                "max_total_num_tokens": service.facts.capacity,
                "weight_version": service.weight_version,
                "paused": engine.paused,
                "weight_update_open": engine.update_session is not None,
                "released_tags": sorted(engine.released),
                "internal_states": [
                    {
                        "num_running_reqs": scheduler.num_active,
                        "num_waiting_reqs": len(scheduler.waiting) + len(engine.held),
                        "cached_prefix_pages": scheduler.cache.num_pages,
                        "free_pages": pool.num_free,
                        "total_pages": pool.pages - 1,
                        "generated_tokens": scheduler.generated_tokens,
                        "steps": scheduler.steps,
                    }
                ],
            }
        )

    return handler


def models(service: Service) -> Handler:
    async def handler(http: HttpRequest) -> Response:
        entry = {
            "id": service.server_args["served_model_name"],
            "object": "model",
            "owned_by": "miles",
            "max_model_len": service.facts.config.context_length,
        }
        return reply({"object": "list", "data": [entry]})

    return handler


def metrics(service: Service) -> Handler:
    """Prometheus text, a few gauges and counters."""

    async def handler(http: HttpRequest) -> Response:
        scheduler = service.engine.scheduler
        values = {
            "sglang:num_running_reqs": scheduler.num_active,
            "sglang:num_queue_reqs": len(scheduler.waiting) + len(service.engine.held),
            "sglang:generation_tokens_total": scheduler.generated_tokens,
            "sglang:token_usage": 1 - scheduler.pool.num_free / max(scheduler.pool.pages - 1, 1),
        }
        return PlainTextResponse("".join(f"{name} {value}\n" for name, value in values.items()))

    return handler
