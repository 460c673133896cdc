"""A trainer of several ranks: what goes wrong at the rank that sends, every rank learns, and none is left waiting."""

from __future__ import annotations

import multiprocessing as mp
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from miles.weight_update.errors import WeightTransferError
from miles.weight_update.transports.base import WeightTransport
from miles.weight_update.types import EngineEndpoint
from miles.weight_update.updater import WeightUpdater

TRANSPORT = f"{__name__}.Recorder"


class Recorder(WeightTransport):
    """Keeps what it was given; fails where `args.fail` says."""

    def connect(self, engines):
        self.sent: list[str] = []
        self.touched = frozenset()
        self._fail("connect")

    def send(self, bucket):
        self.touched = frozenset({0})
        self._fail(f"send {bucket.index}")
        self.sent += bucket.names

    def finish(self):
        self._fail("finish")

    def abandon(self): ...
    def close(self): ...

    def _fail(self, step: str) -> None:
        if self.args.fail == (self.source, step):
            raise (WeightTransferError if step != "finish" else OSError)(
                f"{step} failed", *[self.touched] * (step != "finish")
            )


class Backend:
    """Each rank in `sources` sends its own stage's tensors; every tensor is gathered by a collective."""

    def __init__(self, sources: set[int]) -> None:
        self.rank = dist.get_rank()
        self.is_weight_source = self.rank in sources

    def iter_weights(self):
        for i in range(4):
            shard = torch.full((2,), float(self.rank + i))
            parts = [torch.empty(2) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, shard)
            yield f"stage{self.rank}.layer{i}", torch.cat(parts) if self.is_weight_source else torch.empty(0)


def rank_main(rank: int, store_path: str, sources: set[int], fail, results) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store_path, 2), rank=rank, world_size=2)
    args = SimpleNamespace(
        update_weight_transfer_mode=TRANSPORT, update_weight_buffer_size=16, keep_published_weights=False, fail=fail
    )
    updater = WeightUpdater(args, Backend(sources))
    try:
        report = updater.transfer(1, [EngineEndpoint(0, "http://nowhere", "key", 1, 0)])
        outcome = None if report is None else (sorted(report.manifest), report.buckets, report.nbytes)
    except WeightTransferError as error:
        outcome = (str(error), error.touched)
    dist.all_reduce(torch.ones(1))  # the ranks are still in step
    results.put((rank, outcome))
    dist.destroy_process_group()


@pytest.fixture
def ranks(tmp_path):
    """Run two ranks and return what each reports."""
    context = mp.get_context("spawn")
    started = []

    def run(sources: set[int], fail=None) -> list:
        results = context.Queue()
        for rank in range(2):
            process = context.Process(target=rank_main, args=(rank, str(tmp_path / "store"), sources, fail, results))
            process.start()
            started.append(process)
        outcomes = dict(results.get(timeout=60) for _ in range(2))
        return [outcomes[0], outcomes[1]]

    yield run
    for process in started:
        process.join(10)
        process.kill()


def test_only_the_source_rank_reports(ranks):
    names = [f"stage0.layer{i}" for i in range(4)]
    assert ranks({0}) == [(names, 4, 64), None]


def test_pipeline_stages_send_their_own_tensors_and_the_first_reports_for_all(ranks):
    names = [f"stage{r}.layer{i}" for r in range(2) for i in range(4)]
    assert ranks({0, 1}) == [(names, 8, 128), None]


@pytest.mark.parametrize(
    ("step", "touched"), [("connect", frozenset()), ("send 1", frozenset({0})), ("finish", frozenset({0}))]
)
def test_a_failure_at_the_source_is_raised_on_every_rank(ranks, step, touched):
    outcomes = ranks({1}, fail=(0, step))  # the second rank is the first, and only, source
    text = f"trainer rank 1: {'OSError: ' if step == 'finish' else ''}{step} failed"
    assert outcomes == [(text, touched)] * 2


def test_a_failure_at_one_of_two_sources_fails_the_update_on_both(ranks):
    outcomes = ranks({0, 1}, fail=(1, "connect"))
    # The failed source touched nobody, but what the other sent counts: no engine has a whole set.
    assert outcomes == [("trainer rank 1: connect failed", frozenset({0}))] * 2


def test_a_trainer_without_a_source_is_refused():
    updater = WeightUpdater(SimpleNamespace(), SimpleNamespace(is_weight_source=False))
    with pytest.raises(RuntimeError, match="no trainer rank says that it is a weight source"):
        updater.transfer(1, [])
