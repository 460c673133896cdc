"""`MegatronBackend`: the trainer for large models, spread by megatron-core."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer.enums import AttnBackend

from miles.backends.megatron_utils import optimizer as optimizers
from miles.backends.megatron_utils.checkpoint import TrainState, load_state, save_state
from miles.backends.megatron_utils.forward import Pipeline
from miles.backends.megatron_utils.layout import initialize
from miles.backends.megatron_utils.memory import DeviceMemory
from miles.backends.megatron_utils.model import build_model
from miles.backends.megatron_utils.model_description import describe_model
from miles.backends.megatron_utils.platform import choose_platform
from miles.backends.megatron_utils.train_step import MegatronStepRunner, from_last_stage
from miles.backends.megatron_utils.weight_tags import WeightCopies, put_shards, take_shards
from miles.backends.megatron_utils.weights.checkpoint_files import HFDirectory
from miles.backends.megatron_utils.weights.exporting import WeightExporter
from miles.backends.megatron_utils.weights.loading import load_weights
from miles.backends.megatron_utils.weights.plan import plan_weights
from miles.backends.training_utils.actor_history import Shards
from miles.backends.training_utils.backend import TrainBackend, TrainShard
from miles.backends.training_utils.checkpoint import resolve_load
from miles.backends.training_utils.lr_schedule import build_schedule
from miles.backends.training_utils.model_dir import check_model_dir
from miles.backends.training_utils.model_identity import identity
from miles.backends.training_utils.rng import seed_generators
from miles.backends.training_utils.rollout_dtype import rollout_dtype
from miles.utils.imports import load_function
from miles.utils.seeds import derive_seed

logger = logging.getLogger(__name__)


class MegatronBackend(TrainBackend):
    """Tensor, pipeline, context, expert and data parallelism. Needs an initialised process group, as the FSDP trainer does.

    On a CPU this adapts megatron-core in the process: see `cpu_adaptations`.
    """

    def __init__(self, args: Any, role: str = "actor", *, with_ref: bool = False) -> None:
        """Check the model directories and divide the ranks; builds nothing yet. Collective.

        Raises: ModelDirError when a model directory lacks weights or tokenizer; ValueError for a layout that the ranks
            cannot hold.
        """
        if role != "actor":
            raise ValueError(f"the Megatron trainer has no {role}: it trains the actor only")
        self.args, self.role, self.with_ref = args, role, with_ref
        if init := load_function(getattr(args, "custom_megatron_init_path", None)):
            init(args)
        self.source_dir = check_model_dir(args.hf_checkpoint, "--hf-checkpoint")
        self.weights_dir, self.ref_dir = self.source_dir, self.source_dir
        if ref_load := getattr(args, "ref_load", None):
            self.ref_dir = check_model_dir(ref_load, "--ref-load", needs_tokenizer=False)
            self.weights_dir = self.ref_dir
        load = getattr(args, "load", None) or ""
        self._starts_from_hf = (Path(load) / "config.json").is_file() if load else False
        if self._starts_from_hf:
            self.weights_dir = check_model_dir(load, "--load", needs_tokenizer=False)
        self.platform = choose_platform(getattr(args, "train_device", None))
        self.device = self.platform.device
        self.layout = initialize(args, self.platform)
        self.parallel, self.dp_rank = self.layout.for_planner(), self.layout.dp_rank
        self.before_log_prob = load_function(getattr(args, "custom_megatron_before_log_prob_hook_path", None))

    # ---- loading -------------------------------------------------------------------------------------------------

    def load(self) -> int:
        args = self.args
        resume = None if self._starts_from_hf else _resolve(args)
        dtype = optimizers.compute_dtype(args, self.platform)
        self.description = describe_model(args, self.source_dir, self.platform, dtype)
        config = self.description.config
        config.attention_backend = AttnBackend[getattr(args, "attention_backend", "auto")]
        config.calculate_per_token_loss = True  # gradients are sums: the loss is normalised already
        config.deallocate_pipeline_outputs = True
        models = build_model(args, self.description, self.platform)
        source = HFDirectory(self.source_dir)
        self.plan = plan_weights(models, self.description, source)
        shapes = {name: list(stored.shape) for name, stored in source.tensors.items()}
        self.exporter = WeightExporter(self.plan)
        fixed = self._load_weights(models)
        self.chunks = optimizers.wrap_chunks(args, config, models)
        self.optimizer = optimizers.build_optimizer(args, self.chunks, self.platform)
        self.schedule = build_schedule(args, self.optimizer)
        self.copies = WeightCopies(args, self.chunks, fixed)
        self.memory = DeviceMemory(self.chunks, self.optimizer)
        self.pipeline = Pipeline(args, self.chunks, self.layout, self.device, self.description.vocab_size)
        self.runner = MegatronStepRunner(args, self.pipeline, self.optimizer, self.schedule, self.layout, self.device)
        self.state = TrainState(
            self.chunks, self.optimizer, self.schedule, self.copies,
            identity(self.description.hf_config.to_dict(), shapes),
        )  # fmt: skip
        seed_generators(derive_seed(getattr(args, "seed", 0), "trainer", self.layout.pp_rank, self.dp_rank))
        if resume is None:
            return 0
        store, rollout_id = resume
        load_state(self.state, store.path(rollout_id), args)
        logger.info("resumed from %s", store.path(rollout_id))
        return 0 if getattr(args, "finetune", False) else rollout_id + 1

    def _load_weights(self, models: list[Any]) -> dict[str, Shards]:
        """Fill the model with the actor's weights; returns host copies of the other tags'."""
        fixed: dict[str, Shards] = {}
        if self.with_ref and self.ref_dir != self.weights_dir:
            load_weights(self.plan, HFDirectory(self.ref_dir))
            fixed["ref"] = take_shards(models)
        load_weights(self.plan, HFDirectory(self.weights_dir))
        if self.with_ref and "ref" not in fixed:
            fixed["ref"] = take_shards(models)
        if teacher := self._teacher_dir():
            own = take_shards(models)
            load_weights(self.plan, HFDirectory(teacher))
            fixed["teacher"] = take_shards(models)
            put_shards(models, own)
        return fixed

    def _teacher_dir(self) -> Path | None:
        """Of a teacher that this trainer scores with (`--opd-type megatron`)."""
        if not getattr(self.args, "use_opd", False) or getattr(self.args, "opd_type", None) != "megatron":
            return None
        return check_model_dir(self.args.opd_teacher_load, "--opd-teacher-load", needs_tokenizer=False)

    # ---- one rollout batch ---------------------------------------------------------------------------------------

    def score(self, shard: TrainShard, tag: str) -> list[torch.Tensor]:
        return self._score(shard, tag, with_entropy=False)[0]

    def _score(
        self, shard: TrainShard, tag: str, *, with_entropy: bool
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Log-probs, and entropies if asked for, of every sample under the weights `tag`; on every rank."""
        columns = shard.columns
        if self.before_log_prob is not None:
            self.before_log_prob(self.args, self.chunks, "" if tag == "actor" else f"{tag}_")
        found: tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]] = ({}, {})
        with self.copies.weights(tag):
            for step in shard.steps:
                scored = self.pipeline.score(columns, step.micro_batches, with_entropy=with_entropy)
                for indices, values in zip(step.micro_batches, scored, strict=False):  # nothing on earlier stages
                    lengths = [int(columns["response_lengths"][i]) for i in indices]
                    for kept, flat in zip(found, values, strict=True):
                        if flat is not None:
                            kept.update(zip(indices, flat.cpu().split(lengths), strict=True))
        log_probs, entropies = from_last_stage(found)
        empty, count = torch.empty(0), len(columns["tokens"])
        return (
            [log_probs.get(i, empty) for i in range(count)],
            [entropies.get(i, empty) for i in range(count)] if with_entropy else [],
        )

    def train(self, shard: TrainShard) -> list[dict[str, float]]:
        return self.runner.run(shard, self._score, self.copies)

    # ---- weights out ---------------------------------------------------------------------------------------------

    @property
    def is_weight_source(self) -> bool:
        return self.exporter.is_source

    def iter_weights(self) -> Iterator[Any]:
        wanted, kept = rollout_dtype(self.args), self.plan.dtypes

        def dtype_of(name: str) -> torch.dtype:
            # Which experts a token goes to depends on a bias that engines keep in fp32 too.
            return kept[name] if wanted is None or name.endswith("e_score_correction_bias") else wanted

        yield from self.exporter.iter_units(dtype_of)
        self.copies.published()

    def export_hf(self, directory: Path) -> None:
        self.exporter.write_directory(Path(directory))

    # ---- checkpoints and memory ----------------------------------------------------------------------------------

    def save(self, directory: Path) -> None:
        save_state(self.state, Path(directory), self.args)

    def sleep(self, *, keep_weights: bool = False) -> None:
        if not self.platform.is_cpu and not keep_weights:
            self.memory.release()

    def wake(self) -> None:
        self.memory.restore()


def _resolve(args: Any) -> Any:
    resume = resolve_load(getattr(args, "load", None), getattr(args, "ckpt_step", None))
    if resume is None and getattr(args, "load", None):
        logger.info("--load %s has no checkpoint yet: starting from the Hugging Face weights", args.load)
    return resume
