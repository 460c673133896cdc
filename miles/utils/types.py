"""The trajectory: one `Sample`, from the dataset row to the trainer's door."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any


class SampleStatus(enum.Enum):
    """How a trajectory stands. COMPLETED and TRUNCATED are final; the others are generated again when resubmitted."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(frozen=True)
class VersionSpan:
    """Response tokens `[start, end)` were sampled under weight `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class Failure:
    """Why a sample is FAILED: a category that metrics count (`generation_error`, `reward_timeout`, ...) and a message.

    `permanent`: generating again cannot help (the engine refused the request, the prompt is too long).
    """

    category: str
    message: str
    permanent: bool = False


@dataclass
class SpecInfo:
    """Speculative decoding counts, summed over the sample's engine calls."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    @property
    def spec_accept_rate(self) -> float:
        return self.spec_accept_token_num / self.spec_draft_token_num if self.spec_draft_token_num else 0.0

    @property
    def spec_accept_length(self) -> float:
        return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct else 0.0


@dataclass
class PrefixCacheInfo:
    """Prompt tokens that the engine found in its prefix cache, summed over the sample's engine calls."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    @property
    def prefix_cache_hit_rate(self) -> float:
        return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens else 0.0


@dataclass(frozen=True)
class RewardSpec:
    """Overrides the run's reward for one sample."""

    rm_type: str | None = None
    custom_rm_path: str | None = None


@dataclass
class Sample:
    """One trajectory.

    `tokens` is prompt then response; `response_length` counts its tail, environment tokens of later turns included.
    Per-token fields (`loss_mask`, `rollout_log_probs`, `teacher_log_probs`, `version_spans`) index the response;
    `rollout_routed_experts` has a row for every token but the last, `[tokens - 1, moe_layers, topk]`.
    """

    Status = SampleStatus

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None  # one execution; siblings that one execution yields share it. None means `index`.
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)  # one an engine call, as the engine reported it
    version_spans: list[VersionSpan] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: Any = None
    rollout_indexer_topk: Any = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    opd_reverse_kl: list[float] | None = None
    status: SampleStatus = SampleStatus.PENDING
    failure: Failure | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    adapter: Any = None
    reward_spec: RewardSpec | None = None
    routing_key: str | None = None
    non_generation_time: float = 0.0
    spec_info: SpecInfo = field(default_factory=SpecInfo)
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)

    # ---- identity and values -------------------------------------------------------------------------------------

    @property
    def execution_id(self) -> int | None:
        return self.index if self.rollout_id is None else self.rollout_id

    @property
    def effective_response_length(self) -> int:
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    @property
    def oldest_weight_version(self) -> int | None:
        """Version of the oldest response token; None where no token carries one."""
        if self.version_spans:
            return min(span.version for span in self.version_spans)
        numeric = [int(v) for v in self.weight_versions if v.isdigit()]
        return min(numeric) if numeric else None

    def get_reward_value(self, args: Any) -> float | None:
        """The scalar that trains: the reward itself, or its `--reward-key` entry."""
        if self.reward is None or not getattr(args, "reward_key", None):
            return self.reward  # type: ignore[return-value]
        if not isinstance(self.reward, dict) or args.reward_key not in self.reward:
            raise KeyError(f"--reward-key {args.reward_key}: sample {self.index} has reward {self.reward!r}")
        return self.reward[args.reward_key]

    # ---- changes -------------------------------------------------------------------------------------------------

    def append_response(
        self,
        token_ids: Sequence[int],
        *,
        log_probs: Sequence[float] | None,
        trainable: bool,
        spans: Sequence[VersionSpan] = (),
    ) -> None:
        """Append response tokens and keep every per-token field in step.

        Environment tokens come with `trainable=False` and no log-probs. `spans` are relative to `token_ids`.
        """
        offset = self.response_length
        if self.rollout_log_probs is None:
            self.rollout_log_probs = []
        if trainable and (log_probs is None or len(log_probs) != len(token_ids)):
            got = None if log_probs is None else len(log_probs)
            raise ValueError(f"sample {self.index}: {len(token_ids)} sampled tokens came with {got} log-probs")
        if self.loss_mask is None:
            self.loss_mask = [1] * offset
        self.tokens.extend(token_ids)
        self.loss_mask.extend([int(trainable)] * len(token_ids))
        self.rollout_log_probs.extend(log_probs if trainable and log_probs is not None else [0.0] * len(token_ids))
        self.response_length += len(token_ids)
        for span in spans:
            self._append_span(VersionSpan(span.version, span.start + offset, span.end + offset))

    def _append_span(self, span: VersionSpan) -> None:
        last = self.version_spans[-1] if self.version_spans else None
        if last is not None and last.version == span.version and last.end == span.start:
            self.version_spans[-1] = VersionSpan(span.version, last.start, span.end)
        elif span.end > span.start:
            self.version_spans.append(span)

    def update_from_meta_info(self, args: Any, meta_info: dict[str, Any]) -> None:
        """Take status, weight version and counters of one engine call from its `meta_info`."""
        if "weight_version" in meta_info:
            self.weight_versions.append(str(meta_info["weight_version"]))
        self.prefix_cache_info.cached_tokens += meta_info.get("cached_tokens", 0)
        self.prefix_cache_info.total_prompt_tokens += meta_info.get("prompt_tokens", 0)
        self.spec_info.completion_token_num += meta_info.get("completion_tokens", 0)
        self.spec_info.spec_accept_token_num += meta_info.get("spec_accept_token_num", 0)
        self.spec_info.spec_draft_token_num += meta_info.get("spec_draft_token_num", 0)
        self.spec_info.spec_verify_ct += meta_info.get("spec_verify_ct", 0)
        kind = (meta_info.get("finish_reason") or {}).get("type")
        outcomes = {
            "stop": SampleStatus.COMPLETED,
            "length": SampleStatus.TRUNCATED,
            "abort": SampleStatus.ABORTED,
        }
        if kind not in outcomes:
            raise ValueError(f"sample {self.index}: engine answered with unknown finish_reason {kind!r}")
        self.status = outcomes[kind]

    def fail(self, category: str, message: str, *, permanent: bool = False) -> None:
        """Mark as FAILED. A failed sample has no reward and never trains."""
        self.status, self.failure, self.reward = SampleStatus.FAILED, Failure(category, message, permanent), None

    def reset_for_retry(self) -> None:
        """Forget everything that was generated; keep identity, prompt, metadata and routing key."""
        kept = {"group_index", "index", "prompt", "multimodal_inputs", "label", "metadata"}
        kept |= {"generate_function_path", "train_metadata", "adapter", "reward_spec", "routing_key"}
        fresh = Sample()
        for f in fields(self):
            if f.name not in kept:
                setattr(self, f.name, getattr(fresh, f.name))
        self.status = SampleStatus.ABORTED

    def strip_last_output_tokens(self, n: int, tokenizer: Any) -> None:
        """Drop the last `n` response tokens from every per-token field and decode the text again."""
        if not 0 <= n <= self.response_length:
            raise ValueError(f"sample {self.index}: cannot strip {n} of {self.response_length} response tokens")
        if n == 0:
            return
        self.response_length -= n
        del self.tokens[-n:]
        for name in ("loss_mask", "rollout_log_probs", "teacher_log_probs", "opd_reverse_kl"):
            values = getattr(self, name)
            if values is not None:
                del values[self.response_length :]
        for name in ("rollout_routed_experts", "rollout_indexer_topk"):
            rows = getattr(self, name)
            if rows is not None:
                setattr(self, name, rows[: max(len(self.tokens) - 1, 0)])
        end = self.response_length
        spans = [VersionSpan(s.version, s.start, min(s.end, end)) for s in self.version_spans if s.start < end]
        self.version_spans = spans
        self.response = tokenizer.decode(self.tokens[len(self.tokens) - end :]) if end else ""

    # ---- checks and wire -----------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Raise ValueError, naming every per-token field whose length disagrees with the tokens."""
        n, total = self.response_length, len(self.tokens)
        wrong = [] if 0 <= n <= total else [f"response_length {n} of {total} tokens"]
        for name in ("loss_mask", "rollout_log_probs", "teacher_log_probs", "opd_reverse_kl"):
            values = getattr(self, name)
            if values is not None and len(values) != n:
                wrong.append(f"{name} has {len(values)} entries for {n} response tokens")
        for name in ("rollout_routed_experts", "rollout_indexer_topk"):
            rows = getattr(self, name)
            if rows is not None and len(rows) != total - 1:
                wrong.append(f"{name} has {len(rows)} rows for {total} tokens (expected {total - 1})")
        covered = 0
        for span in self.version_spans:
            if not covered <= span.start < span.end <= n:
                wrong.append(f"version span [{span.start}, {span.end}) is out of order or out of range")
            covered = span.end
        if wrong:
            raise ValueError(f"sample {self.index}: " + "; ".join(wrong))

    def to_dict(self) -> dict[str, Any]:
        out = {f.name: getattr(self, f.name) for f in fields(self)}
        out["status"] = self.status.value
        out["failure"] = None if self.failure is None else vars(self.failure)
        out["reward_spec"] = None if self.reward_spec is None else vars(self.reward_spec)
        out["version_spans"] = [(s.version, s.start, s.end) for s in self.version_spans]
        out["spec_info"], out["prefix_cache_info"] = vars(self.spec_info).copy(), vars(self.prefix_cache_info).copy()
        return out

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Sample:
        """Inverse of `to_dict`. Unknown keys become attributes, so that a hook's own fields survive."""
        data = dict(data)
        sample = cls()
        data["status"] = SampleStatus(data.get("status", "pending"))
        if data.get("failure") is not None:
            data["failure"] = Failure(**data["failure"])
        if data.get("reward_spec") is not None:
            data["reward_spec"] = RewardSpec(**data["reward_spec"])
        data["version_spans"] = [VersionSpan(*s) for s in data.get("version_spans", [])]
        data["spec_info"] = SpecInfo(**data.get("spec_info", {}))
        data["prefix_cache_info"] = PrefixCacheInfo(**data.get("prefix_cache_info", {}))
        for name, value in data.items():
            setattr(sample, name, value)
        return sample


Group = list[Sample]
