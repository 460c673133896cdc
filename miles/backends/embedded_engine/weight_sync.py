"""Weight updates: receive tensors, check every one, then store them; and the checker that proves what is served."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from miles.backends.embedded_engine.engine import Engine
from miles.backends.embedded_engine.weights import WeightError, Weights, check_tensor, load_directory
from miles.utils.digest import dtype_name, tensor_digest
from miles.utils.memory import return_freed_memory
from miles.utils.process_group import leave_group

NamedTensors = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class TensorSpec:
    """What a sender announces: name, dtype and shape of one tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def parse_specs(names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[TensorSpec]:
    """Raises: WeightError when the lists disagree in length or a dtype is unknown."""
    if not len(names) == len(dtypes) == len(shapes):
        raise WeightError(
            f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes: give one of each a tensor"
        )
    specs = []
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        found = getattr(torch, str(dtype).removeprefix("torch."), None)
        if not isinstance(found, torch.dtype):
            raise WeightError(f"{name}: unknown dtype {dtype!r}")
        specs.append(TensorSpec(name, found, tuple(int(s) for s in shape)))
    return specs


def split_bucket(flat: torch.Tensor, specs: Iterable[TensorSpec]) -> NamedTensors:
    """Cut one uint8 tensor, the bytes of all tensors in order, into views with their dtypes and shapes."""
    out, start = [], 0
    for spec in specs:
        piece = flat[start : start + spec.nbytes]
        if piece.numel() != spec.nbytes:
            raise WeightError(f"{spec.name}: the bucket ends after {flat.numel()} bytes, this tensor needs more")
        if start % spec.dtype.itemsize:
            piece = piece.clone()  # a view needs an aligned start
        out.append((spec.name, piece.view(spec.dtype).view(spec.shape)))
        start += spec.nbytes
    if start != flat.numel():
        raise WeightError(f"the bucket has {flat.numel()} bytes, its {len(out)} tensors need {start}")
    return out


def lossless(value: torch.Tensor, dtype: torch.dtype) -> bool:
    """True when casting to `dtype` and back gives the same numbers."""
    return value.dtype == dtype or torch.equal(value.to(dtype).to(value.dtype), value)


def check_all(weights: Weights, tensors: NamedTensors) -> None:
    """Raise WeightError naming every tensor of an update that does not fit; nothing has been stored then.

    A tensor in another float type is taken when the cast to the served type changes none of its numbers.
    """
    problems = []
    for name, value in tensors:
        problem = check_tensor(weights, name, tuple(value.shape), value.dtype)
        if problem is None:
            slot = weights.find(name)
            assert slot is not None
            if not lossless(value, slot.dtype):
                problem = (
                    f"{name}: {dtype_name(value.dtype)} values would be rounded to the served {dtype_name(slot.dtype)}"
                )
        if problem:
            problems.append(problem)
    if problems:
        raise WeightError("refused, nothing was loaded: " + "; ".join(problems))


@dataclass
class WeightSync:
    """Weight state of one engine: communication groups, the checker's snapshot. Methods with `_locked` run in its thread."""

    engine: Engine
    model_path: str
    groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    snapshot: dict[str, torch.Tensor] | None = None
    backup: dict[str, torch.Tensor] | None = None

    @property
    def weights(self) -> Weights:
        return self.engine.scheduler.model.weights

    # ---- receiving (any thread) ----------------------------------------------------------------------------------

    def receive_distributed(self, specs: list[TensorSpec], group_name: str, flattened: bool) -> NamedTensors:
        """Take part in rank 0's broadcasts: of one bucket, or of one tensor after another in list order.

        Raises: WeightError; a group that failed is left, since its ranks no longer agree on what comes next.
        """
        group = self.groups.get(group_name)
        if group is None:
            raise WeightError(f"no weight update group {group_name!r}: call /init_weights_update_group first")
        try:
            return self._receive(specs, group, flattened)
        except RuntimeError as error:
            self.groups.pop(group_name, None)
            with contextlib.suppress(Exception):
                leave_group(group, abort=True)
            raise WeightError(
                f"the transfer over group {group_name!r} failed, and this rank left it: {error}"
            ) from error

    def _receive(self, specs: list[TensorSpec], group: dist.ProcessGroup, flattened: bool) -> NamedTensors:
        device = torch.device("cpu") if dist.get_backend(group) == "gloo" else self.weights.device
        if flattened:
            flat = torch.empty(sum(s.nbytes for s in specs), dtype=torch.uint8, device=device)
            dist.broadcast(flat, src=0, group=group)
            return split_bucket(flat, specs)
        tensors = []
        for spec in specs:
            tensor = torch.empty(spec.shape, dtype=spec.dtype, device=device)
            dist.broadcast(tensor, src=0, group=group)
            tensors.append((spec.name, tensor))
        return tensors

    # ---- in the engine thread ------------------------------------------------------------------------------------

    def begin_locked(self, selector: str) -> None:
        if selector not in ("all", "target", "draft"):
            raise WeightError(f"selector {selector!r} is not all, target or draft")
        if self.engine.update_session is not None:
            raise WeightError("a weight update is already open: call /end_weight_update first")
        self.engine.update_session = selector

    def end_locked(self) -> None:
        if self.engine.update_session is None:
            raise WeightError("no weight update is open: call /begin_weight_update first")
        self.engine.update_session = None

    def store_locked(self, tensors: NamedTensors, *, needs_session: bool = True) -> None:
        """Check and store tensors. What was computed with the old ones is forgotten."""
        faults = self.engine.faults
        faults.on_update()
        if "ack_without_loading" in faults.wanted:
            return
        if needs_session and self.engine.update_session is None:
            raise WeightError("no weight update is open: call /begin_weight_update first")
        if self.weights.released:
            raise WeightError("the weights' memory is released: call /resume_memory_occupation first")
        if self.engine.update_session == "draft":
            raise WeightError("selector 'draft': this engine has no draft model")
        tensors = [(name, value.to(self.weights.device)) for name, value in tensors]
        check_all(self.weights, tensors)
        dropped, corrupted = faults.wanted.get("drop_tensor"), faults.wanted.get("corrupt_tensor")
        for name, value in tensors:
            if name == dropped:
                continue
            if name == corrupted:
                value = value.clone()
                value.view(-1)[0] += 1
            self.weights.write(name, value)
        self.weights.seal()
        self.engine.scheduler.drop_cache()

    def load_disk_locked(self, path: str) -> None:
        faults = self.engine.faults
        faults.on_update()
        if "ack_without_loading" in faults.wanted:
            return
        if self.weights.released:
            raise WeightError("the weights' memory is released: call /resume_memory_occupation first")
        load_directory(self.weights, path)
        self.engine.scheduler.drop_cache()

    def set_version_locked(self, version: str) -> None:
        self.engine.scheduler.weight_version = version

    # ---- memory --------------------------------------------------------------------------------------------------

    def release_locked(self, tags: set[str], keep_copy: bool) -> None:
        """Free the memory of `tags`. Raises: WeightError while requests hold the cache or a tag is released already."""
        busy = self.engine.scheduler.num_active
        if busy:
            raise WeightError(f"{busy} requests hold the cache: pause with mode abort or retract first")
        again = tags & self.engine.released
        if again:
            raise WeightError(f"already released: {', '.join(sorted(again))}")
        if "weights" in tags:
            if keep_copy:
                self.backup = {name: t.detach().cpu().clone() for name, t in self.weights.named_tensors()}
            self.weights.release()
        if tags & {"weights", "kv_cache"}:
            self.engine.scheduler.drop_cache()
        if "kv_cache" in tags:
            self.engine.scheduler.pool.free_storage()
        self.engine.released |= tags
        if self.weights.device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            return_freed_memory()

    def resume_locked(self, tags: set[str]) -> None:
        absent = tags - self.engine.released
        if absent:
            raise WeightError(f"not released: {', '.join(sorted(absent))}")
        if "weights" in tags:
            self.weights.restore_storage()
            if self.backup is not None:
                for name, value in self.backup.items():
                    self.weights.write(name, value)
                self.backup = None
                self.weights.seal()
        if "kv_cache" in tags:
            self.engine.scheduler.pool.allocate_storage()
        self.engine.released -= tags

    # ---- checker -------------------------------------------------------------------------------------------------

    def check_locked(self, action: str, skip: Sequence[str]) -> dict[str, Any]:
        """Run a /weights_checker action over tensors whose name has none of the substrings in `skip`."""
        actions: dict[str, Callable[[list[str]], dict[str, Any]]] = {
            "checksum": self._checksum,
            "snapshot": self._snapshot,
            "reset_tensors": self._reset,
            "compare": self._compare,
        }
        if action not in actions:
            raise WeightError(f"unknown action {action!r}: {', '.join(actions)}")
        if self.weights.released:
            raise WeightError("the weights' memory is released")
        return actions[action]([n for n in self.weights.slots if not any(part in n for part in skip)])

    def _checksum(self, names: list[str]) -> dict[str, Any]:
        checksums = {name: tensor_digest(self.weights.slots[name].read()) for name in names}
        return {"message": f"digests of {len(checksums)} tensors", "ranks": [{"checksums": checksums}]}

    def _snapshot(self, names: list[str]) -> dict[str, Any]:
        self.snapshot = {name: self.weights.slots[name].read().detach().clone() for name in names}
        return {"message": f"kept a copy of {len(names)} tensors"}

    def _reset(self, names: list[str]) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(0x5EED)
        for name in names:
            slot = self.weights.slots[name]
            self.weights.write(name, torch.randn(slot.shape, generator=generator).to(slot.dtype))
        self.weights.seal()
        self.engine.scheduler.drop_cache()
        return {"message": f"filled {len(names)} tensors with noise"}

    def _compare(self, names: list[str]) -> dict[str, Any]:
        if self.snapshot is None:
            raise WeightError("compare: call with action snapshot first")
        different = []
        for name in names:
            if name in self.snapshot and not torch.equal(self.snapshot[name], self.weights.slots[name].read()):
                different.append(name)
        if different:
            raise WeightError(f"{len(different)} tensors differ from the snapshot: {', '.join(different)}")
        return {"message": f"{len(names)} tensors equal the snapshot"}
