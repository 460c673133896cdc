"""How samples are laid out: what lies where, and which rows predict which response tokens."""

import torch

from miles.backends.fsdp_utils.layout import PackedLayout, build_inputs

CPU = torch.device("cpu")
# Two responses to 1 2 3, one to 1 2, and one more to 1 2 3.
SAMPLES = [([1, 2, 3], [4, 5]), ([1, 2], [3, 6]), ([1, 2, 3], [7]), ([1, 2, 3], [4, 5, 8])]
TOKENS = [torch.tensor(prompt + response) for prompt, response in SAMPLES]
RESPONSES = [len(response) for _, response in SAMPLES]


def context_of(inputs, row):
    """The tokens that the flattened position `row` sees, in order."""
    ids, positions = inputs.input_ids.flatten(), inputs.position_ids.flatten()
    start, segment = 0, 0
    while row >= start + inputs.packed.lengths[segment]:
        start += inputs.packed.lengths[segment]
        segment += 1
    seen = list(range(start, row + 1))
    prefix = inputs.packed.prefixes[segment]
    if prefix is not None:
        first = sum(inputs.packed.lengths[:prefix])
        seen = [*range(first, first + inputs.packed.lengths[prefix]), *seen]
    assert positions[seen].tolist() == list(range(len(seen)))
    return ids[seen].tolist()


def test_every_response_token_is_predicted_from_all_that_comes_before_it():
    for share in (False, True):
        inputs, targets = build_inputs(TOKENS, RESPONSES, CPU, packed=True, share_prompts=share)
        wanted = [
            (t[:i].tolist(), int(t[i]))
            for t, r in zip(TOKENS, RESPONSES, strict=True)
            for i in range(len(t) - r, len(t))
        ]
        got = [
            (context_of(inputs, row), target)
            for row, target in zip(inputs.rows.tolist(), targets.tolist(), strict=True)
        ]
        assert got == wanted


def test_a_prompt_of_several_samples_lies_in_the_row_once():
    inputs, _ = build_inputs(TOKENS, RESPONSES, CPU, packed=True, share_prompts=True)
    assert inputs.input_ids.tolist() == [[1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 4, 5, 8]]
    assert inputs.packed == PackedLayout([3, 2, 4, 1, 3], [None, 0, None, 0, 0])


def test_without_sharing_each_sample_lies_whole():
    inputs, _ = build_inputs(TOKENS, RESPONSES, CPU, packed=True)
    assert inputs.input_ids.tolist() == [[1, 2, 3, 4, 5, 1, 2, 3, 6, 1, 2, 3, 7, 1, 2, 3, 4, 5, 8]]
    assert inputs.packed == PackedLayout.whole([5, 4, 4, 6]) and not inputs.packed.shares


def test_padded_rows():
    inputs, targets = build_inputs(TOKENS[:2], RESPONSES[:2], CPU, packed=False)
    assert inputs.input_ids.tolist() == [[1, 2, 3, 4, 5], [1, 2, 3, 6, 0]] and inputs.packed is None
    assert inputs.rows.tolist() == [2, 3, 6, 7] and targets.tolist() == [4, 5, 3, 6]
