"""What a request may ask of the sampler, checked field by field."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

GREEDY_BELOW = 1e-6  # temperatures under this mean argmax
_UNSUPPORTED = ("stop_regex", "json_schema", "regex", "ebnf", "structural_tag", "custom_params", "beam_width")


class RequestError(ValueError):
    """A request that cannot be served as it stands; becomes HTTP 400."""


@dataclass
class SamplingParams:
    """SGLang's sampling parameters that the engine implements, with SGLang's defaults."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    logit_bias: dict[int, float] | None = None
    sampling_seed: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def filtered(self) -> bool:
        """True where top-p, top-k or min-p cut the distribution."""
        return not self.greedy and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0)

    @property
    def edits_logits(self) -> bool:
        return bool(
            self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1.0 or self.logit_bias
        )


_JSON_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,)}
_FIELDS = {f.name: _JSON_TYPES.get(str(f.type).split(" ")[0], (object,)) for f in fields(SamplingParams)}


def parse_sampling_params(raw: Any, vocab_size: int) -> SamplingParams:
    """Check a request's `sampling_params`. Raises: RequestError that lists everything wrong with it."""
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        raise RequestError(f"sampling_params must be an object, got {type(raw).__name__}")
    problems: list[str] = []
    values: dict[str, Any] = {}
    for name, value in raw.items():
        if name in _UNSUPPORTED or name == "stream_interval":
            if value not in (None, 1):
                problems.append(f"{name} is not supported by the embedded engine")
        elif name not in _FIELDS:
            problems.append(f"unknown sampling parameter {name!r}")
        elif value is not None:
            values[name] = value
    _convert(values, problems)
    params = SamplingParams()
    if not problems:
        params = SamplingParams(**values)
        problems = _out_of_range(params, vocab_size)
    if problems:
        raise RequestError("sampling_params: " + "; ".join(problems))
    return params


def _convert(values: dict[str, Any], problems: list[str]) -> None:
    """Bring JSON values to the field types, in place."""
    for name, value in list(values.items()):
        kinds = _FIELDS[name]
        wrong_bool = isinstance(value, bool) and kinds in ((int,), (int, float))
        if not isinstance(value, kinds) or wrong_bool:
            problems.append(f"{name} has type {type(value).__name__}")
    if isinstance(values.get("stop"), str):
        values["stop"] = [values["stop"]]
    for name, kind in (("stop", str), ("stop_token_ids", int)):
        if name in values:
            if not isinstance(values[name], list) or not all(isinstance(v, kind) for v in values[name]):
                problems.append(f"{name} must be a list of {kind.__name__}")
            else:
                values[name] = tuple(v for v in values[name] if v != "")
    if "logit_bias" in values:
        try:
            values["logit_bias"] = {int(k): float(v) for k, v in dict(values["logit_bias"]).items()}
        except (TypeError, ValueError):
            problems.append("logit_bias must map token ids to numbers")


def _out_of_range(p: SamplingParams, vocab_size: int) -> list[str]:
    checks = [
        (p.max_new_tokens >= 0, f"max_new_tokens {p.max_new_tokens} is negative"),
        (0 <= p.temperature < float("inf"), f"temperature {p.temperature} is not in [0, inf)"),
        (0 < p.top_p <= 1, f"top_p {p.top_p} is not in (0, 1]"),
        (p.top_k == -1 or p.top_k >= 1, f"top_k {p.top_k} is neither -1 nor at least 1"),
        (0 <= p.min_p <= 1, f"min_p {p.min_p} is not in [0, 1]"),
        (-2 <= p.frequency_penalty <= 2, f"frequency_penalty {p.frequency_penalty} is not in [-2, 2]"),
        (-2 <= p.presence_penalty <= 2, f"presence_penalty {p.presence_penalty} is not in [-2, 2]"),
        (0 < p.repetition_penalty <= 2, f"repetition_penalty {p.repetition_penalty} is not in (0, 2]"),
        (
            0 <= p.min_new_tokens <= p.max_new_tokens,
            f"min_new_tokens {p.min_new_tokens} is not in [0, max_new_tokens={p.max_new_tokens}]",
        ),
        (p.n >= 1, f"n {p.n} is below 1"),
        (
            all(0 <= t < vocab_size for t in p.logit_bias or ()),
            f"logit_bias names a token outside the vocabulary of {vocab_size}",
        ),
        (
            all(0 <= t < vocab_size for t in p.stop_token_ids),
            f"stop_token_ids has a token outside the vocabulary of {vocab_size}",
        ),
        (
            p.sampling_seed is None or -(2**63) <= p.sampling_seed < 2**64,
            f"sampling_seed {p.sampling_seed} does not fit 64 bits",
        ),
    ]
    return [message for ok, message in checks if not ok]
