"""`FSDPBackend`: the trainer that takes any Hugging Face directory as it is."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from miles.backends.fsdp_utils.export import iter_hf_tensors, names_unlike_checkpoint
from miles.backends.fsdp_utils.loading import LoadedPolicy, ShardingOptions, load_policy, reshard
from miles.backends.fsdp_utils.optimizer import build_optimizer
from miles.backends.fsdp_utils.scorer import Scores, score_micro_batch, values_of_micro_batch
from miles.backends.fsdp_utils.state import TrainState, load_state, save_state
from miles.backends.fsdp_utils.train_step import StepRunner
from miles.backends.fsdp_utils.weight_tags import WeightCopies
from miles.backends.training_utils.backend import TrainBackend, TrainParallelConfig, TrainShard
from miles.backends.training_utils.checkpoint import resolve_load
from miles.backends.training_utils.device_storage import DeviceStorage
from miles.backends.training_utils.hf_directory import write_hf_directory
from miles.backends.training_utils.lr_schedule import build_schedule
from miles.backends.training_utils.model_dir import check_model_dir
from miles.backends.training_utils.rng import seed_generators
from miles.backends.training_utils.rollout_dtype import rollout_dtype
from miles.utils.seeds import derive_seed

logger = logging.getLogger(__name__)


class FSDPBackend(TrainBackend):
    """Pure data parallelism: every rank holds a shard of each parameter and trains on its own samples.

    Needs an initialised process group: gloo for the CPU, `cpu:gloo,cuda:nccl` for GPUs.
    """

    def __init__(self, args: Any, role: str = "actor", *, with_ref: bool = False) -> None:
        """Check what can be checked without building anything.

        Raises: ModelDirError when a model directory lacks weights or tokenizer; ValueError for a layout that does not
            divide the world.
        """
        if role not in ("actor", "critic"):
            raise ValueError(f"the FSDP trainer trains an actor or a critic, not {role!r}")
        self.args, self.role, self.with_ref = args, role, with_ref
        self.device = _device(args)
        self.world_size, self.rank = dist.get_world_size(), dist.get_rank()
        self.parallel, self.dp_rank = TrainParallelConfig(dp_size=self.world_size), self.rank
        self.source_dir = check_model_dir(args.hf_checkpoint, "--hf-checkpoint")
        self.weights_dir, self.ref_dir = self.source_dir, self.source_dir
        ref_load = getattr(args, "ref_load", None)
        if ref_load:
            self.ref_dir = check_model_dir(ref_load, "--ref-load", needs_tokenizer=False)
            self.weights_dir = self.ref_dir
        load = getattr(args, "load", None)
        if load and (Path(load) / "config.json").is_file():
            self.weights_dir = check_model_dir(load, "--load", needs_tokenizer=False)
        self.mesh = _mesh(args, self.device, self.world_size)

    # ---- loading -------------------------------------------------------------------------------------------------

    def load(self) -> int:
        args = self.args
        resume = None if (Path(getattr(args, "load", None) or "") / "config.json").is_file() else _resolve(args)
        self.actor = load_policy(self.weights_dir, self._options())
        exports = self.rank == 0 and self.role == "actor"
        differs = names_unlike_checkpoint(self.actor, self.source_dir) if exports else None
        if differs is not None:
            logger.warning("engines that read %s may not know every tensor of an update: %s", self.source_dir, differs)
        params = [p for p in self.actor.module.parameters() if p.requires_grad]
        self.optimizer = build_optimizer(args, params)
        self.schedule = build_schedule(args, self.optimizer)
        self.ref: LoadedPolicy | None = None
        if self.with_ref:
            self.ref = load_policy(self.ref_dir, self._options(reference=True))
            self.ref.module.requires_grad_(False).eval()
        self._asleep = DeviceStorage(self.device)
        self.copies = WeightCopies(args, self.actor, self.ref)
        self.runner = StepRunner(args, self.actor, self.optimizer, self.schedule, self.mesh, self.device)
        # Dropout on each rank from a stream of its own; a checkpoint brings the states of all.
        seed_generators(derive_seed(getattr(args, "seed", 0), "trainer", self.rank))
        if resume is None:
            return 0
        store, rollout_id = resume
        load_state(self._state(), store.path(rollout_id), args)
        logger.info("resumed from %s", store.path(rollout_id))
        return 0 if getattr(args, "finetune", False) else rollout_id + 1

    def _options(self, *, reference: bool = False) -> ShardingOptions:
        args = self.args
        offload = bool(getattr(args, "fsdp_cpu_offload", False))
        return ShardingOptions(
            mesh=self.mesh,
            device=self.device,
            compute_dtype=_compute_dtype(args, self.device),
            master_dtype=torch.float32 if getattr(args, "keep_fp32_master", True) else None,
            # A reference model is used once a rollout: its shards wait on the host.
            cpu_offload=offload or (reference and self.device.type == "cuda"),
            attn_implementation=_attention(args, self.device),
            packed=getattr(args, "qkv_format", "thd") == "thd",
            share_prompts=not getattr(args, "disable_prompt_sharing", False),
            gradient_checkpointing=bool(getattr(args, "gradient_checkpointing", False)) and not reference,
            trust_remote_code=bool(getattr(args, "trust_remote_code", False)),
            value_head=self.role == "critic",
            seed=int(getattr(args, "seed", 0)),
        )

    def _state(self) -> TrainState:
        return TrainState(self.actor, self.optimizer, self.schedule, self.copies.changing_models())

    # ---- one rollout batch ---------------------------------------------------------------------------------------

    def score(self, shard: TrainShard, tag: str) -> list[torch.Tensor]:
        return self._score(shard, tag, with_entropy=False)[0]

    @torch.no_grad()
    def _score(
        self, shard: TrainShard, tag: str, *, with_entropy: bool
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Log-probs, and entropies if asked for, of every sample under the weights `tag`; of a critic its values."""
        count = len(shard.columns["tokens"])
        log_probs: list[torch.Tensor] = [torch.empty(0)] * count
        entropies: list[torch.Tensor] = [torch.empty(0)] * count if with_entropy else []
        with self.copies.weights(tag) as loaded:
            loaded.module.eval()
            for indices in (mb for step in shard.steps for mb in step.micro_batches):
                scores = self._forward(loaded, shard, indices, with_entropy=with_entropy)
                lengths = [int(shard.columns["response_lengths"][i]) for i in indices]
                for i, values in zip(indices, scores.log_probs.cpu().split(lengths), strict=True):
                    log_probs[i] = values
                if scores.entropy is not None:
                    for i, values in zip(indices, scores.entropy.cpu().split(lengths), strict=True):
                        entropies[i] = values
        return log_probs, entropies

    def _forward(
        self, loaded: LoadedPolicy, shard: TrainShard, indices: Sequence[int], *, with_entropy: bool
    ) -> Scores:
        if self.role == "critic":
            return Scores(values_of_micro_batch(loaded, shard.columns, indices, self.device), None)
        return score_micro_batch(self.args, loaded, shard.columns, indices, self.device, with_entropy=with_entropy)

    def train(self, shard: TrainShard) -> list[dict[str, float]]:
        return self.runner.run(shard, self._score, self.copies)

    # ---- weights out ---------------------------------------------------------------------------------------------

    @property
    def is_weight_source(self) -> bool:
        # Handles of device memory are for the engine on the same device, so that each rank sends its own.
        return self.rank == 0 or getattr(self.args, "update_weight_transfer_mode", None) == "ipc"

    def iter_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        wanted = rollout_dtype(self.args)
        kept = self.actor.checkpoint_dtypes
        with torch.no_grad():
            yield from iter_hf_tensors(self.actor, lambda name: wanted or kept[name], keep=self.is_weight_source)
        self.copies.published()

    def export_hf(self, directory: Path) -> None:
        kept = self.actor.checkpoint_dtypes
        writes = self.rank == 0
        tensors = iter_hf_tensors(self.actor, lambda name: kept[name], keep=writes)
        save_config = self.actor.config.save_pretrained
        write_hf_directory(tensors, self.source_dir, Path(directory), save_config, writes=writes)

    # ---- checkpoints and memory ----------------------------------------------------------------------------------

    def save(self, directory: Path) -> None:
        save_state(self._state(), Path(directory), self.args)

    def sleep(self, *, keep_weights: bool = False) -> None:
        if self.device.type != "cuda":
            return
        self.optimizer.zero_grad(set_to_none=True)
        state = (value for values in self.optimizer.state.values() for value in values.values())
        self._asleep.release(value for value in state if isinstance(value, torch.Tensor))
        if not keep_weights:
            models = [self.actor, self.ref] if self.ref is not None else [self.actor]
            for loaded in models:
                reshard(loaded.module)
                self._asleep.release([*loaded.module.parameters(), *loaded.module.buffers()])
        torch.cuda.empty_cache()

    def wake(self) -> None:
        self._asleep.restore()


def _device(args: Any) -> torch.device:
    kind = getattr(args, "train_device", None) or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("--train-device cuda: this process sees no GPU; use --train-device cpu, or a machine with one")
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")


def _mesh(args: Any, device: torch.device, world: int) -> DeviceMesh:
    replicas = int(getattr(args, "dp_replicate_size", 1) or 1)
    if world % replicas:
        raise ValueError(f"--dp-replicate-size {replicas} does not divide the {world} trainer ranks")
    if replicas == 1:
        return init_device_mesh(device.type, (world,), mesh_dim_names=("dp",))
    return init_device_mesh(device.type, (replicas, world // replicas), mesh_dim_names=("dp_replicate", "dp"))


def _compute_dtype(args: Any, device: torch.device) -> torch.dtype | None:
    if getattr(args, "fp16", False):
        return torch.float16
    if getattr(args, "bf16", False) or device.type == "cuda":
        return torch.bfloat16
    return None


def _attention(args: Any, device: torch.device) -> str:
    """`--attn-implementation`; by default what fits the machine."""
    wanted = getattr(args, "attn_implementation", None)
    if wanted is None:
        from transformers.utils import is_flash_attn_2_available

        wanted = "flash_attention_2" if device.type == "cuda" and is_flash_attn_2_available() else "sdpa"
    if device.type == "cpu" and wanted.startswith("flash"):
        raise ValueError(f"--attn-implementation {wanted} needs a GPU: use sdpa or eager on a CPU")
    return wanted


def _resolve(args: Any) -> Any:
    resume = resolve_load(getattr(args, "load", None), getattr(args, "ckpt_step", None))
    if resume is None and getattr(args, "load", None):
        logger.info("--load %s has no checkpoint yet: starting from the Hugging Face weights", args.load)
    return resume
