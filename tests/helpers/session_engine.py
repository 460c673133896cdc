"""An engine for session tests that samples from the ids it is sent, and says things that a wrong prompt would change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from miles.rollout.session.errors import EngineUnavailable
from miles.rollout.tito.boundary import TitoTokenizer
from miles.utils.seeds import derive_seed


def log_prob(token: int, position: int) -> float:
    """What the engine reports for a token at a place of its whole sequence; tests compute it again."""
    return -(1 + (token * 7 + position) % 97) / 128


def words(prompt: list[int]) -> str:
    """A short answer that depends on every token of the prompt."""
    return f"the answer {derive_seed('words', *prompt) % 10_000} and on"


class TokenEngine:
    """`/generate` as a pure function of `input_ids`.

    Answers are spelled byte by byte, as no tokenizer would spell them, so that re-tokenised text is seen.

    Args:
        say: text of the answer, from the prompt's text; None answers with `words` of the ids.
        stop: the token that ends an answer; from the prompt's text where it is a function.
    Attributes:
        prompts: the ids of every request. change: applied to each answer before it is given. gate: holds answers back.
    """

    def __init__(
        self,
        tito: TitoTokenizer,
        say: Callable[[str], str] | None = None,
        stop: str | Callable[[str], str] | None = None,
    ) -> None:
        self.tito, self.say = tito, say
        self.stop = stop or tito.family.stops[0]
        self.prompts: list[list[int]] = []
        self.payloads: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.change: Callable[[dict[str, Any]], dict[str, Any]] = lambda answer: answer
        self.fail: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.version = "1"
        self.cancelled = 0
        self.die_after: int | None = None  # chunks of a stream

    def _answer(self, payload: dict[str, Any]) -> dict[str, Any]:
        prompt = [int(i) for i in payload["input_ids"]]
        self.prompts.append(prompt)
        self.payloads.append(payload)
        encoder = self.tito.encoder
        text = encoder.decode(prompt)
        said = words(prompt) if self.say is None else self.say(text)
        ids: list[int] = []
        for character in said if "<" not in said and "｜" not in said else [said]:
            ids += encoder.encode(character)
        stop = self.stop(text) if callable(self.stop) else self.stop
        limit = payload["sampling_params"]["max_new_tokens"]
        reason: dict[str, Any] = {"type": "stop", "matched": None}
        if stop:
            ids.append(encoder.special_ids[stop])
        if len(ids) > limit:
            ids, reason = ids[:limit], {"type": "length", "length": limit}
        meta = {
            "finish_reason": reason,
            "prompt_tokens": len(prompt),
            "completion_tokens": len(ids),
            "cached_tokens": len(prompt) // 2,
            "weight_version": self.version,
            "output_token_logprobs": [[log_prob(t, len(prompt) + i), t, None] for i, t in enumerate(ids)],
        }
        return self.change({"output_ids": ids, "text": said, "meta_info": meta})

    async def generate(self, payload: dict[str, Any], key: str) -> dict[str, Any]:
        self.keys.append(key)
        answer = self._answer(payload)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.fail is not None:
            raise self.fail
        return answer

    async def stream(self, payload: dict[str, Any], key: str) -> AsyncIterator[dict[str, Any]]:
        self.keys.append(key)
        answer = self._answer(payload)
        try:
            count = len(answer.get("output_ids", "-"))
            for n in range(1, count + 1):
                await self.gate.wait()
                if self.die_after is not None and n > self.die_after:
                    raise EngineUnavailable("the engine died")
                if n == count:
                    yield answer
                else:
                    meta = answer["meta_info"] | {"finish_reason": None}
                    yield {"output_ids": answer["output_ids"][:n], "meta_info": meta}
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise
