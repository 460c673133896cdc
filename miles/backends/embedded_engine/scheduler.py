"""Continuous batching: which tokens are computed in the next step, and what happens to the results."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from miles.backends.embedded_engine.attention import ExtendPlan, MaskBank, Span, Workspace, build_extend_plan
from miles.backends.embedded_engine.decode_batch import DecodeBatch
from miles.backends.embedded_engine.forward import Model
from miles.backends.embedded_engine.kv_cache import PAGE, PagePool
from miles.backends.embedded_engine.linear import ROW_STEP
from miles.backends.embedded_engine.prefix_cache import PrefixCache
from miles.backends.embedded_engine.prompt_outputs import route_table, score_prompt, scored_prompt_tokens, store_routes
from miles.backends.embedded_engine.request import Request, finish_abort, finish_length
from miles.backends.embedded_engine.sampler import SamplingBatch, sample, top_logprobs

_PREFILLS_IN_A_ROW = 8  # prefill steps that requests which decode wait for at most, however long the queue is
_SIBLING_TOKENS = 32  # requests that share this many first tokens wait for the first of them to fill the cache


@dataclass(frozen=True)
class SchedulerLimits:
    """Token counts. `max_total_tokens` is the size of the cache, running requests and cached prefixes together."""

    max_running_requests: int
    max_total_tokens: int
    chunked_prefill_size: int
    prefix_caching: bool = True


class Scheduler:
    """Owns the cache and every request that was handed in. Not thread-safe: the engine thread calls it."""

    def __init__(self, model: Model, limits: SchedulerLimits):
        self.model, self.limits, self.config = model, limits, model.config
        weights = model.weights
        pages = 1 + max(1, limits.max_total_tokens // PAGE)
        self.pool = PagePool(self.config, pages, weights.device, weights.dtype)
        self.cache = PrefixCache(self.pool, limits.prefix_caching)
        self.bank = MaskBank(weights.device, self.config.group_size)
        max_pages = min(pages, -(-self.config.context_length // PAGE))
        self.batch = DecodeBatch(self.pool, self.bank, limits.max_running_requests, max_pages)
        self.waiting: deque[Request] = deque()
        self.prefilling: list[Request] = []
        self.running: list[Request] = []
        self.weight_version = "default"
        self._sampling: SamplingBatch | None = None  # of `running`; None when the list has changed
        self._prefill_space = Workspace()
        self._decode_next = False
        self._prefills = 0  # since the last decode step
        self.generated_tokens = 0
        self.steps = 0

    # ---- requests in and out -------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    @property
    def num_active(self) -> int:
        """Requests that hold cache pages."""
        return len(self.prefilling) + len(self.running)

    @property
    def num_requests(self) -> int:
        return self.num_active + len(self.waiting)

    def all_requests(self) -> list[Request]:
        return [*self.running, *self.prefilling, *self.waiting]

    def abort(self, request: Request, message: str = "Aborted", status_code: int | None = None) -> None:
        self._finish(request, finish_abort(message, status_code))
        self.cache.commit()

    def retract(self, request: Request) -> None:
        """Give up a request's cache; it waits at the front of the queue and is computed again."""
        self._drop_pages(request)
        request.retractions += 1
        self._forget(request)
        if len(request.input_logprobs) < scored_prompt_tokens(request):
            request.input_logprobs, request.input_top, request.input_chosen = [], [], []
        self.waiting.appendleft(request)

    def retract_all(self) -> None:
        for request in reversed([*self.running, *self.prefilling]):
            self.retract(request)

    def _drop_pages(self, request: Request) -> None:
        for page in request.pages:
            self.pool.give_back(page)
        request.pages, request.kv_len = [], 0

    def _forget(self, request: Request) -> None:
        """Remove a request from whichever list it is in."""
        if request in self.running:
            self.running.remove(request)
            self._sampling = None
        elif request in self.prefilling:
            self.prefilling.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def _finish(self, request: Request, reason: dict) -> None:
        request.finish_reason = reason
        request.weight_version = self.weight_version
        self._forget(request)
        if request.kv_epoch == self.model.weights.epoch and not request.cache_namespace.startswith("!"):
            tokens = request.tokens(0, request.kv_len)
            self.cache.insert(request.cache_namespace, tokens, request.pages)
        self._drop_pages(request)
        request.emit(request)

    # ---- one step ------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Compute one batch, prefill before decode; False when there was nothing to do."""
        self._admit()
        decode_next = self._decode_next or self._prefills >= _PREFILLS_IN_A_ROW
        self._decode_next = False
        if self.prefilling and not (decode_next and self.running):
            self._prefills += 1
            self._prefill()
        elif self.running:
            self._prefills = 0
            self._decode()
        else:
            return False
        self.cache.commit()
        self.steps += 1
        return True

    def _admit(self) -> None:
        """Move waiting requests to `prefilling` while the batch and the cache have room."""
        started = {self._sibling_key(r) for r in self.prefilling}
        deferred = []
        while self.waiting and self.num_active < self.limits.max_running_requests:
            request = self.waiting.popleft()
            key = self._sibling_key(request)
            if key in started and self.cache.enabled and self._cached_tokens(request) < len(key[1]) - 1:
                deferred.append(request)
                continue
            if not self._start(request):
                self.waiting.appendleft(request)
                break
            started.add(key)
        self.waiting.extendleft(reversed(deferred))

    @staticmethod
    def _sibling_key(request: Request) -> tuple[str, tuple[int, ...]]:
        return request.cache_namespace, tuple(request.input_ids[:_SIBLING_TOKENS])

    def _reusable(self, request: Request) -> int:
        """Prompt tokens that may come from the cache: the last one is needed for its logits, scored ones too."""
        limit = request.length - 1
        if request.return_logprob and request.logprob_start_len >= 0 and not request.input_logprobs:
            limit = min(limit, request.logprob_start_len)
        return limit

    def _cached_tokens(self, request: Request) -> int:
        limit = self._reusable(request)
        return self.cache.match(request.cache_namespace, request.tokens(0, limit), limit).length

    def _start(self, request: Request) -> bool:
        """Give a request its pages, filled from the cache where possible; False when there are too few."""
        needed = request.length // PAGE + 1
        headroom = self.num_active if self.num_active else 0  # each running request may soon need a page
        if needed + headroom > self.pool.num_free + self.cache.num_pages:
            return False
        request.pages = [self._take_page() for _ in range(needed)]
        limit = self._reusable(request)
        match = self.cache.match(request.cache_namespace, request.tokens(0, limit), limit)
        if match.length:
            self.pool.copy(match.pages, request.pages[: len(match.pages)])
            if self.pool.routes is not None:
                cached = self.pool.routes[request.pages].flatten(0, 1)[: match.length]
                request.add_routes(cached.numpy(), 0)
        request.kv_len = match.length
        request.kv_epoch = self.model.weights.epoch
        if request.retractions == 0:
            request.cached_tokens = match.length
        self.prefilling.append(request)
        return True

    def _take_page(self) -> int:
        page = self.pool.take_low()
        while page is None:
            if not self.cache.evict_one():
                raise RuntimeError("the page accounting is wrong: no free page where one was promised")
            page = self.pool.take_low()
        return self.cache.trade_for_lower(page)

    # ---- prefill -------------------------------------------------------------------------------------------------

    def _prefill(self) -> None:
        budget = self.limits.chunked_prefill_size
        spans: list[tuple[Request, Span]] = []
        for request in self.prefilling:
            if budget == 0:
                break
            end = min(request.length, request.kv_len + budget)
            budget -= end - request.kv_len
            spans.append((request, Span(request.kv_len, end, request.pages)))
        # Prompts that need several steps must not hold up those that decode; but a step for few costs as much as for many.
        self._decode_next = budget == 0 and len(self.running) >= len(self.prefilling) + len(self.waiting)
        total = sum(s.end - s.start for _, s in spans)
        padding = _padded_rows(total) - total
        plan = build_extend_plan(self.pool, self.bank, [s for _, s in spans], padding, self._prefill_space)
        ids = [t for r, s in spans for t in r.tokens(s.start, s.end)] + [0] * padding
        positions = np.concatenate([*(np.arange(s.start, s.end) for _, s in spans), np.arange(padding)])
        done, last = self._completed(spans)
        scored = any(len(r.input_logprobs) < scored_prompt_tokens(r) for r, _ in spans)
        keep = last if not scored and self.config.moe is None else None  # what follows needs no other rows
        hidden = self._forward(torch.tensor(ids), torch.from_numpy(positions), plan, spans, keep)
        row = 0
        for request, span in spans:
            if scored:
                score_prompt(self.model, request, span, hidden[row : row + span.end - span.start])
            row += span.end - span.start
            request.kv_len = span.end
        if done:
            self._after_prefill(done, hidden if keep is not None else hidden.index_select(0, last))

    def _completed(self, spans: list[tuple[Request, Span]]) -> tuple[list[Request], torch.Tensor]:
        """Requests whose tokens end in these spans, and the row of each one's last token (see decode_batch: padded)."""
        done, rows, row = [], [], 0
        for request, span in spans:
            row += span.end - span.start
            if span.end == request.length:
                done.append(request)
                rows.append(row - 1)
        rows = rows or [0]
        return done, torch.tensor(rows + rows[:1] * (-len(rows) % ROW_STEP), device=self.pool.device)

    def _forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        plan: ExtendPlan,
        spans: list[tuple[Request, Span]],
        keep: torch.Tensor | None,
    ) -> torch.Tensor:
        assert self.pool.kv is not None
        device = self.pool.device
        routes: list[torch.Tensor] | None = [] if self.config.moe is not None else None
        hidden = self.model.hidden(ids.to(device), positions.to(device), plan, self.pool.kv, routes, keep)
        if routes:
            table, row = route_table(self.config, routes), 0
            for request, span in spans:
                part = table[row : row + span.end - span.start]
                row += len(part)
                store_routes(self.pool, request, span.start, part)
        return hidden

    def _after_prefill(self, done: list[Request], hidden: torch.Tensor) -> None:
        """Sample the first tokens of `done` from the hidden states of their last ones [>= requests, hidden]."""
        for request in done:
            self.prefilling.remove(request)
            if request.kv_epoch == self.model.weights.epoch:
                self.cache.insert(request.cache_namespace, request.tokens(0, request.kv_len), request.pages)
        keep = [i for i, r in enumerate(done) if len(r.output_ids) < r.params.max_new_tokens]
        for i, request in enumerate(done):
            if i not in keep:
                self._finish(request, finish_length(request))
        if not keep:
            return
        requests = [done[i] for i in keep]
        logits = self.model.logits(hidden)[torch.tensor(keep, device=hidden.device)]
        batch = SamplingBatch.of(requests, hidden.device, self.config.vocab_size)
        positions = np.array([r.length for r in requests])
        self.running.extend(requests)
        self._sampling = None
        self._accept(requests, *sample(logits, batch, positions))

    # ---- decode --------------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        if self._sampling is None:
            self._rebuild()
        while rows := self.batch.rows_without_room():
            if not self._make_room(len(rows)):
                self._retract_one()
                self._rebuild()
                continue
            for row in rows:
                self.batch.give_page(row, self._take_page())
        assert self._sampling is not None and self.pool.kv is not None
        requests = self.batch.requests
        ids, positions, plan = self.batch.plan()
        routes: list[torch.Tensor] | None = [] if self.config.moe is not None else None
        hidden = self.model.hidden(ids, positions, plan, self.pool.kv, routes)
        if routes:
            table = route_table(self.config, routes)
            for row, request in enumerate(requests):
                store_routes(self.pool, request, request.kv_len, table[row : row + 1])
        n = len(requests)
        logits = self.model.logits(hidden)[:n]
        for request in requests:
            request.kv_len += 1
        tokens, logps, logp = sample(logits, self._sampling, self.batch.positions[:n] + 1)
        self.batch.advance(tokens.cpu().numpy())
        self._accept(requests, tokens, logps, logp)

    def _rebuild(self) -> None:
        self._sampling = SamplingBatch.of(list(self.running), self.pool.device, self.config.vocab_size)
        self.batch.set(list(self.running))

    def _make_room(self, pages: int) -> bool:
        while self.pool.num_free < pages:
            if not self.cache.evict_one():
                return False
        return True

    def _retract_one(self) -> None:
        """Take the cache from the request that loses least: fewest output tokens, latest arrival."""
        if self.prefilling:
            self.retract(max(self.prefilling, key=lambda r: r.arrived))
            return
        self.retract(min(self.running, key=lambda r: (len(r.output_ids), -r.arrived)))

    # ---- results -------------------------------------------------------------------------------------------------

    def _accept(
        self, requests: Sequence[Request], tokens: torch.Tensor, logps: torch.Tensor, logp: torch.Tensor
    ) -> None:
        """Append one token a request, and finish those that are done."""
        version = self.weight_version
        self.generated_tokens += len(requests)
        for row, (request, token, value) in enumerate(zip(requests, tokens.tolist(), logps.tolist(), strict=True)):
            if not math.isfinite(value):
                self._reject_non_finite(request)
                continue
            if not request.spans or request.spans[-1][0] != version:
                request.stamp_version(version)
            if request.return_logprob and (request.top_logprobs_num or request.token_ids_logprob):
                request.output_top.append(top_logprobs(logp[row], request.top_logprobs_num))
                request.output_chosen.append([(logp[row, t].item(), t) for t in request.token_ids_logprob])
            request.output_logprobs.append(value)
            request.output_ids.append(token)  # last: a stream that reads meanwhile goes by its length
            reason = self._stop_reason(request, token)
            if reason is not None:
                self._finish(request, reason)
            elif request.stream:
                request.emit(request)

    @staticmethod
    def _stop_reason(request: Request, token: int) -> dict | None:
        if token in request.stop_ids:
            return {"type": "stop", "matched": token}
        if request.stopper is not None:
            request.stopper.feed(token)
            if len(request.output_ids) >= request.params.min_new_tokens:
                matched = request.stopper.matched()
                if matched is not None:
                    return {"type": "stop", "matched": matched}
        if len(request.output_ids) >= request.params.max_new_tokens:
            return finish_length(request)
        return None

    def _reject_non_finite(self, request: Request) -> None:
        """NaN or infinite logits: the weights are broken, and so is what this request left in the cache."""
        request.kv_epoch = -1
        message = f"non-finite logits under weight version {self.weight_version}: check the weights of the last update"
        self._finish(request, finish_abort(message, 500))
        self.cache.clear()
        self.pool.scrub_free_pages()

    # ---- cache control -------------------------------------------------------------------------------------------

    def drop_cache(self) -> None:
        """Forget every cached prefix; running requests keep theirs."""
        self.cache.clear()


def _padded_rows(tokens: int) -> int:
    """Prefill sizes are rounded up to a few shapes, since a library prepares each shape once."""
    step = 16 if tokens <= 256 else 32
    return -(-tokens // step) * step
