import pytest
import torch

from miles.backends.training_utils.batching.packing import layout_micro_batch, pack_micro_batch, pad_micro_batch
from tests.fast.training_utils.toy import ToyModel, make_args

TOKENS = [[1, 2, 3, 4, 5], [6, 7, 8], [9, 10, 11, 12]]
RESPONSES = [2, 1, 3]


def test_a_packed_row_written_out():
    packed = pack_micro_batch(TOKENS, RESPONSES, pad_multiple=8)
    assert packed.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0, 0, 0, 0]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3]]
    assert packed.cu_seqlens.tolist() == [0, 5, 8, 12, 16], "padding is a sequence of its own"
    assert packed.rows.tolist() == [2, 3, 6, 8, 9, 10], "each token is predicted by the row before it"
    assert packed.targets.tolist() == [4, 5, 8, 10, 11, 12]
    assert packed.num_tokens == 12 and packed.max_seqlen == 5 and packed.attention_mask is None
    assert [x.tolist() for x in packed.split(packed.targets)] == [[4, 5], [8], [10, 11, 12]]


def test_padded_rows_written_out():
    padded = pad_micro_batch(TOKENS, RESPONSES, pad_multiple=3)
    assert padded.input_ids.tolist() == [[1, 2, 3, 4, 5, 0], [6, 7, 8, 0, 0, 0], [9, 10, 11, 12, 0, 0]]
    assert padded.attention_mask.tolist() == [[1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0]]
    assert padded.rows.tolist() == [2, 3, 7, 12, 13, 14]
    assert padded.targets.tolist() == [4, 5, 8, 10, 11, 12] and padded.cu_seqlens is None


def test_no_label_crosses_a_border():
    """The first response token of a sample never depends on the sample packed before it."""
    model = ToyModel()
    alone = pack_micro_batch(TOKENS[1:2], RESPONSES[1:2])
    together = pack_micro_batch(TOKENS, RESPONSES, pad_multiple=8)
    expected = model.hidden(alone)[alone.rows]
    got = together.split(model.hidden(together)[together.rows])[1]
    torch.testing.assert_close(got, expected)
    assert set(together.rows.tolist()).isdisjoint(range(12, 16)), "no padding row is scored"
    last_rows = [int(b) - 1 for b in together.cu_seqlens[1:]]
    assert set(together.rows.tolist()).isdisjoint(last_rows), "the last token of a sequence predicts nothing"


@pytest.mark.parametrize("lay_out", [pack_micro_batch, pad_micro_batch])
def test_a_response_without_a_prompt_is_refused(lay_out):
    with pytest.raises(ValueError, match="sample 1: 3 response tokens of 3"):
        lay_out(TOKENS[:2], [2, 3])


def test_an_empty_response_has_no_rows():
    packed = pack_micro_batch(TOKENS[:2], [0, 1])
    assert packed.rows.tolist() == [6] and [len(x) for x in packed.split(packed.targets)] == [0, 1]


def test_the_layout_follows_the_flag():
    assert layout_micro_batch(make_args(), TOKENS, RESPONSES).cu_seqlens is not None
    assert layout_micro_batch(make_args(qkv_format="bshd"), TOKENS, RESPONSES).attention_mask is not None
    moved = layout_micro_batch(make_args(), TOKENS, RESPONSES).to("cpu")
    assert moved.rows.device.type == "cpu" and moved.response_lengths == RESPONSES
