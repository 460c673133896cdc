"""One generation of a session: place the request, let an engine sample, check the answer, commit it.

Nothing waits between placing a request and sending it, nor between a checked answer and its commit, so no lock is needed; what
changes in between is found by the commit itself.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
import xxhash

from miles.backends.training_utils.replay.expert_layout import RouteError
from miles.rollout.prompts import expert_layout
from miles.rollout.session.config import SessionConfig
from miles.rollout.session.errors import Aborted, BadEngineAnswer, RequestRefused, SessionNotFound
from miles.rollout.session.history import Node, Position, Turn
from miles.rollout.session.store import Session, SessionStore
from miles.rollout.session.upstream import Upstream
from miles.rollout.tito.boundary import TitoTokenizer
from miles.rollout.tito.matchers import Message
from miles.rollout.tito.replies import Reply, ReplyParser
from miles.rollout.tito.template import MessageError
from miles.utils.seeds import derive_seed

_META = ("prompt_tokens", "completion_tokens", "cached_tokens", "weight_version", "e2e_latency", "spec_accept_token_num",
         "spec_draft_token_num", "spec_verify_ct")  # fmt: skip


@dataclass(frozen=True)
class ChatRequest:
    """What an agent asks for, whichever API it used.

    Attributes:
        sampling: parameters as engines call them, without a limit of tokens.
        max_tokens: most tokens of the answer; None for as many as fit.
        use_tools: whether calls in the answer are read as calls.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    use_tools: bool = True

    def identity(self) -> str:
        """Of everything that the first prompt renders besides messages."""
        return xxhash.xxh3_64_hexdigest(orjson.dumps([self.tools, self.template_kwargs], option=orjson.OPT_SORT_KEYS))


@dataclass(frozen=True)
class Prepared:
    """A placed request and what the engine is sent for it."""

    request: ChatRequest
    identity: str
    position: Position
    prompt_ids: np.ndarray
    drop: int
    shared: int  # tokens of the prompt that the parent's row gave
    payload: dict[str, Any]
    key: str
    parser: ReplyParser
    shielded: int
    started: float


@dataclass(frozen=True)
class Answer:
    """A committed turn as APIs tell it. `text` is what the model wrote, without the token that ended it."""

    id: str
    message: Message
    reply: Reply
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    text: str
    turn: Turn


class Recorder:
    """Runs the generations of all sessions of a server."""

    def __init__(self, config: SessionConfig, tito: TitoTokenizer, store: SessionStore, upstream: Upstream) -> None:
        self.config, self.tito, self.store, self.upstream = config, tito, store, upstream
        self._openers: dict[str, bool] = {}
        self._experts = expert_layout(config) if config.routed_experts else None
        self._stop_ids = [i for i in (tito.encoder.special_ids.get(s) for s in tito.family.stops) if i is not None]

    # ---- before the engine -------------------------------------------------------------------------------------------

    def prepare(self, session: Session, request: ChatRequest) -> Prepared:
        """Place a request and make its tokens. Changes nothing that is kept. Raises: SessionError, MessageError."""
        self.store.check_room()
        kwargs = self.tito.template.merged_kwargs(self.tito.template.kwargs, request.template_kwargs)
        identity = request.identity()
        position = session.history.place(request.messages, identity)
        before = self.tito.encoder.shielded
        parent, drop = position.parent, 0
        if parent is None:
            own = np.asarray(self.tito.prompt_ids(request.messages, request.tools, kwargs), dtype=np.int32)
            ids, shared = own, 0
        else:
            row = parent.row()
            suffix = self.tito.suffix(int(row[-1]), parent.said, position.suffix, request.tools, kwargs)
            own, drop = np.asarray(suffix.ids, dtype=np.int32), suffix.drop
            shared = len(row) - drop
            ids = np.concatenate([row[:shared], own])
        return Prepared(
            request=request,
            identity=identity,
            position=position,
            prompt_ids=own,
            drop=drop,
            shared=shared,
            payload=self._payload(session, request, ids, shared, parent),
            key=_routing_key(session, position),
            parser=self._parser(request, kwargs),
            shielded=self.tito.encoder.shielded - before,
            started=time.time(),
        )

    def _payload(
        self, session: Session, request: ChatRequest, ids: np.ndarray, shared: int, parent: Node | None
    ) -> dict[str, Any]:
        room = self._room(session, len(ids))
        limit = room if request.max_tokens is None else min(request.max_tokens, room)
        sampling = {
            **request.sampling,
            "max_new_tokens": limit,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "no_stop_trim": True,
        }
        if self._stop_ids and not sampling.get("ignore_eos"):
            sampling["stop_token_ids"] = sorted({*self._stop_ids, *sampling.get("stop_token_ids", ())})
        if "sampling_seed" not in sampling and session.seed is not None:
            place = None if parent is None else parent.seq
            attempt = session.attempts[place] = session.attempts.get(place, -1) + 1
            sampling["sampling_seed"] = derive_seed(session.seed, len(ids), attempt)
        payload = {
            "rid": uuid.uuid4().hex,
            "input_ids": ids,
            "sampling_params": sampling,
            "return_logprob": True,
        }
        if self._experts is not None:
            payload |= {"return_routed_experts": True, "routed_experts_start_len": max(shared - 1, 0)}
        return payload

    def _room(self, session: Session, prompt: int) -> int:
        limits = [n for n in (self.config.context_length, session.max_seq_len) if n is not None]
        if not limits:
            raise RequestRefused("nothing bounds a conversation: set --rollout-max-context-len")
        if prompt >= min(limits):
            raise RequestRefused(
                f"context_length_exceeded: the conversation has {prompt} tokens and may have {min(limits)}, answer included "
                "(--rollout-max-context-len, --max-seq-len)"
            )
        return min(limits) - prompt

    def _parser(self, request: ChatRequest, kwargs: Mapping[str, Any]) -> ReplyParser:
        family = self.tito.family
        key = repr(sorted(kwargs.items()))
        if key not in self._openers:
            self._openers[key] = self.tito.opener(kwargs).rstrip().endswith("<think>")
        specs = request.tools if request.use_tools else None
        stops = request.sampling.get("stop") or ()
        stops = (stops,) if isinstance(stops, str) else tuple(stops)
        return ReplyParser(family.reasoning, family.tools, self._openers[key], specs, stops)

    # ---- the engine ----------------------------------------------------------------------------------------------------

    async def generate(self, session: Session, prepared: Prepared) -> Answer:
        """Sample and commit. Raises: SessionError; then nothing has changed."""
        answer = await self.upstream.generate(prepared.payload, prepared.key)
        return self.finish(session, prepared, answer)

    async def stream(self, session: Session, prepared: Prepared) -> AsyncIterator[Reply | Answer]:
        """Replies as they grow, and last the committed answer."""
        growing = _GrowingText(self.tito, prepared.parser)
        last: dict[str, Any] | None = None
        async for chunk in self.upstream.stream(prepared.payload, prepared.key):
            last = chunk
            reply = growing.add(chunk.get("output_ids") or [])
            if reply is not None:
                yield reply
        if last is None:
            raise BadEngineAnswer("the engine's stream ended without an answer; nothing was kept")
        yield self.finish(session, prepared, last)

    # ---- after the engine ----------------------------------------------------------------------------------------------

    def finish(self, session: Session, prepared: Prepared, answer: dict[str, Any]) -> Answer:
        """Check the engine's answer and commit it. Raises: SessionError; then nothing has changed."""
        if session.closing:
            raise SessionNotFound(f"session {session.id} was deleted while it generated")
        turn = self._turn(prepared, answer)
        text = self._text(turn, answer)
        reply = prepared.parser.parse(text)
        message = _message(reply, turn)
        request, parent = prepared.request, prepared.position.parent
        tools = parent.tools if parent is not None else request.tools  # one list for a whole line
        node = session.history.commit(
            prepared.position, message, turn, prepared.identity, tools, request.template_kwargs or None
        )
        session.shielded += prepared.shielded
        self.store.committed(session, node)
        return Answer(
            id=turn.response_id,
            message=message,
            reply=reply,
            finish_reason="tool_calls" if reply.calls and turn.finish_reason == "stop" else turn.finish_reason,
            prompt_tokens=prepared.shared + len(prepared.prompt_ids),
            completion_tokens=len(turn.output_ids),
            cached_tokens=int(turn.meta.get("cached_tokens") or 0),
            text=text,
            turn=turn,
        )

    def _turn(self, prepared: Prepared, answer: dict[str, Any]) -> Turn:
        meta = answer.get("meta_info")
        if not isinstance(meta, dict):
            raise BadEngineAnswer("the engine's answer has no meta_info; nothing was kept")
        finish = (meta.get("finish_reason") or {}).get("type")
        if finish == "abort":
            raise Aborted("the engine aborted this generation; nothing was kept")
        if finish not in ("stop", "length"):
            raise BadEngineAnswer(f"the engine ended with finish_reason {finish!r}; nothing was kept")
        ids, log_probs = self._sampled(prepared, answer, meta)
        return Turn(
            prompt_ids=prepared.prompt_ids,
            output_ids=np.asarray(ids, dtype=np.int32),
            log_probs=np.asarray(log_probs, dtype=np.float64),
            drop=prepared.drop,
            versions=_versions(meta, len(ids)),
            finish_reason=finish,
            response_id=f"chatcmpl-{prepared.payload['rid']}",
            started=prepared.started,
            ended=time.time(),
            routes=self._routes(prepared, meta, len(ids)),
            meta={name: meta[name] for name in _META if meta.get(name) is not None},
        )

    def _sampled(
        self, prepared: Prepared, answer: dict[str, Any], meta: dict[str, Any]
    ) -> tuple[list[int], list[float]]:
        """Ids and log-probs, from the engine's pairs, held against everything else that it says about them."""
        pairs = meta.get("output_token_logprobs")
        if not pairs:
            raise BadEngineAnswer(
                "the engine gave no log-probs of sampled tokens (output_token_logprobs); nothing was kept"
            )
        try:
            ids, log_probs = [pair[1] for pair in pairs], [pair[0] for pair in pairs]
            tokens, values = np.asarray(ids), np.asarray(log_probs)
        except (TypeError, IndexError, ValueError) as error:
            raise BadEngineAnswer(f"output_token_logprobs is malformed: {error}; nothing was kept") from error
        prompt = prepared.shared + len(prepared.prompt_ids)
        echoed = answer.get("prompt_token_ids")
        problems = [
            (tokens.dtype.kind != "i" or tokens.min() < 0 or tokens.max() >= 2**31, "ids that are no token ids"),
            (values.dtype.kind not in "fi" or not np.isfinite(values).all(), "log-probs that are no numbers"),
            (answer.get("output_ids") not in (None, ids), "output_ids that are not those of its log-probs"),
            (meta.get("completion_tokens") not in (None, len(ids)), f"{len(ids)} log-probs for {meta.get('completion_tokens')} tokens"),
            (meta.get("prompt_tokens") not in (None, prompt), f"a prompt of {meta.get('prompt_tokens')} tokens, not the {prompt} it was sent"),
            (echoed is not None and echoed != prepared.payload["input_ids"].tolist(), "another prompt than it was sent"),
        ]  # fmt: skip
        found = [text for wrong, text in problems if wrong]
        if found:
            raise BadEngineAnswer(f"the engine answered with {'; with '.join(found)}; nothing was kept")
        return ids, log_probs

    def _routes(self, prepared: Prepared, meta: dict[str, Any], count: int) -> np.ndarray | None:
        if self._experts is None:
            return None
        rows = prepared.shared + len(prepared.prompt_ids) + count - 1 - max(prepared.shared - 1, 0)
        try:
            return self._experts.decode(meta.get("routed_experts") or "", rows)
        except RouteError as error:
            raise BadEngineAnswer(f"{error}; nothing was kept") from error

    def _text(self, turn: Turn, answer: dict[str, Any]) -> str:
        ids = turn.output_ids.tolist()
        if ids[-1] in self.tito.stop_ids:
            return self.tito.encoder.decode(ids[:-1])
        text = self.tito.encoder.decode(ids)
        matched = (answer["meta_info"].get("finish_reason") or {}).get("matched")
        if isinstance(matched, str) and matched in text:
            text = text[: text.rindex(matched)]  # as OpenAI does; the ids stay
        return text


class _GrowingText:
    """Decodes and parses an answer while it grows, ever more rarely, so that a long one costs little more than once."""

    def __init__(self, tito: TitoTokenizer, parser: ReplyParser) -> None:
        self._tito, self._parser = tito, parser
        self._text, self._done, self._read = "", 0, 0
        self._parsed = -1

    def add(self, ids: list[int]) -> Reply | None:
        """The reply with these ids (all of them so far), or None when there is too little news."""
        ids = ids[:-1] if ids and ids[-1] in self._tito.stop_ids else ids
        decode = self._tito.encoder.decode
        before = decode(ids[self._done : self._read])
        now = decode(ids[self._done :])
        if now.endswith("\ufffd"):
            return None
        self._text += now[len(before) :]
        self._done, self._read = self._read, len(ids)
        if len(self._text) - self._parsed <= len(self._text) // 64:
            return None
        self._parsed = len(self._text)
        return self._parser.parse(self._text, final=False)


def _routing_key(session: Session, position: Position) -> str:
    """A line keeps its engine; a branch gets its own, so that sub-agents spread over engines."""
    parent, history = position.parent, session.history
    if parent is None:
        first = not history.nodes or position.head is not None
        return session.id if first else f"{session.id}/{history.next_seq}"
    path = parent.path()
    fork = next((n.seq for n in reversed(path) if n.parent is not None and n.parent.children[0] is not n), None)
    root = path[0].seq
    base = session.id if root == 0 else f"{session.id}/{root}"
    if parent.children and position.head is None:  # a tree: somebody went on from here already
        return f"{session.id}/{history.next_seq}"
    return base if fork is None else f"{session.id}/{fork}"


def _versions(meta: dict[str, Any], count: int) -> tuple[tuple[str, int, int], ...]:
    reported = meta.get("weight_versions")
    if not reported:
        version = meta.get("weight_version")
        return () if version is None else ((str(version), 0, count),)
    spans = [(str(s["version"]), max(s["start"], 0), min(s["end"], count)) for s in reported]
    return tuple(span for span in spans if span[2] > span[1])


def _message(reply: Reply, turn: Turn) -> Message:
    """The assistant's message; ids of calls come from the sampled tokens, so that equal runs have equal ids."""
    message: Message = {"role": "assistant", "content": reply.content or None}
    if reply.reasoning is not None:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        digest = xxhash.xxh3_64_hexdigest(turn.prompt_ids.tobytes() + turn.output_ids.tobytes())
        message["tool_calls"] = [
            {
                "id": call.id or f"call_{digest}{i}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for i, call in enumerate(reply.calls)
        ]
    elif reply.content == "":
        message["content"] = ""
    return message


__all__ = ["Answer", "ChatRequest", "MessageError", "Prepared", "Recorder"]
