"""One generation, from arrival to answer."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from miles.backends.embedded_engine.sampling_params import SamplingParams

TopLogprobs = list[tuple[float, int]]


@dataclass(eq=False)
class Request:
    """State of one sequence.

    `kv_len` tokens of `input_ids + output_ids` have keys and values in `pages`. Per-token outputs are parallel to
    `output_ids`. `spans` holds [weight version, first output token] in order.
    """

    rid: str
    input_ids: list[int]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    emit: Callable[[Request], None]  # called from the engine thread when there is something to send
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: tuple[int, ...] = ()
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0
    cache_namespace: str = ""
    stopper: Any = None  # stopping.StopStrings, when the request has stop strings or streams text

    output_ids: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    output_top: list[TopLogprobs] = field(default_factory=list)
    output_chosen: list[TopLogprobs] = field(default_factory=list)
    input_logprobs: list[float | None] = field(default_factory=list)
    input_top: list[TopLogprobs | None] = field(default_factory=list)
    input_chosen: list[TopLogprobs | None] = field(default_factory=list)
    routes: list[np.ndarray] = field(default_factory=list)  # [tokens, layers, top_k] int32, in token order
    routed_tokens: int = 0
    spans: list[tuple[str, int]] = field(default_factory=list)
    finish_reason: dict[str, Any] | None = None
    weight_version: str = ""

    pages: list[int] = field(default_factory=list)
    kv_len: int = 0
    kv_epoch: int = -1
    cached_tokens: int = 0
    retractions: int = 0
    abort_requested: bool = False
    arrived: float = field(default_factory=time.monotonic)

    @property
    def length(self) -> int:
        return len(self.input_ids) + len(self.output_ids)

    @property
    def max_length(self) -> int:
        return len(self.input_ids) + self.params.max_new_tokens

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def tokens(self, start: int, end: int) -> list[int]:
        """Tokens [start, end) of prompt and output together."""
        n = len(self.input_ids)
        if end <= n:
            return self.input_ids[start:end]
        return self.input_ids[start:] + self.output_ids[max(0, start - n) : end - n]

    def stamp_version(self, version: str) -> None:
        """Tokens sampled from now on are `version`'s."""
        start = len(self.output_ids)
        if self.spans and self.spans[-1][1] == start:
            self.spans.pop()
        if not self.spans or self.spans[-1][0] != version:
            self.spans.append((version, start))

    def version_spans(self) -> list[dict[str, Any]]:
        ends = [*(start for _, start in self.spans[1:]), len(self.output_ids)]
        pairs = zip(self.spans, ends, strict=False)  # no span, one end, before the first token
        return [{"version": v, "start": s, "end": e} for (v, s), e in pairs if e > s]

    def add_routes(self, routes: np.ndarray, first: int) -> None:
        """Record experts of tokens [first, first + len): only of those not recorded yet.

        After a retraction the prefix is computed again; the routes that its tokens were sampled with stay.
        """
        skip = self.routed_tokens - first
        if skip < len(routes):
            self.routes.append(routes[max(skip, 0) :].astype(np.int32))
            self.routed_tokens = first + len(routes)

    def encoded_routes(self) -> str:
        """Base64 of C-order int32 [prompt + completion - 1 - start, layers, top_k]."""
        if not self.routes:
            return ""
        table = np.concatenate(self.routes)[: self.length - 1]
        return base64.b64encode(np.ascontiguousarray(table[self.routed_experts_start_len :]).tobytes()).decode()


def finish_length(request: Request) -> dict[str, Any]:
    return {"type": "length", "length": len(request.output_ids)}


def finish_abort(message: str, status_code: int | None = None) -> dict[str, Any]:
    kind = None if status_code is None else ("BadRequestError" if status_code < 500 else "InternalServerError")
    return {"type": "abort", "message": message, "status_code": status_code, "err_type": kind}
