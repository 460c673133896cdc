"""Own attention: borders of packed rows, grouped queries, MLA's widths, and the same under context parallelism."""

from __future__ import annotations

import pytest
import torch

from miles.backends.megatron_utils.context_parallel import zig_zag_index
from tests.fast.megatron_utils import attention_jobs as jobs
from tests.helpers.gloo_world import World


@pytest.mark.parametrize("mla", [False, True], ids=["gqa", "mla"])
def test_two_ranks_share_every_packed_sequence_and_agree_with_attention_written_out(pair: World, mla: bool):
    for differences in pair.run(jobs.largest_differences, mla):
        assert max(differences) < 1e-12


def test_padded_rows_are_shared_too(pair: World):
    assert max(pair.run(jobs.padded_differs_by)) < 1e-12


def test_zig_zag_gives_each_rank_the_first_and_the_last_chunk_of_its_own():
    assert zig_zag_index([8, 4], 0, 2).tolist() == [0, 1, 6, 7, 8, 11]
    assert zig_zag_index([8, 4], 1, 2).tolist() == [2, 3, 4, 5, 9, 10]
    held = torch.cat([zig_zag_index([12, 24], rank, 3) for rank in range(3)])
    assert held.sort().values.tolist() == list(range(36))
    with pytest.raises(ValueError, match="multiple of 4 tokens"):
        zig_zag_index([8, 6], 0, 2)
