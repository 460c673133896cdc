"""However a sample is cut and continued, its per-token fields stay in step and its tokens stay as they were."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from miles.rollout.base_types import GenerateFnInput
from miles.rollout.generate_hub.single_turn import generate
from miles.rollout.generate_state import GenerateState
from miles.rollout.train_data import convert_samples_to_train_data
from miles.utils.types import Sample, SampleStatus
from tests.fast.rollout.fakes import FakePool, answer, make_args, write_tokenizer


class CutPool(FakePool):
    """Gives out a fixed sequence, cut after so many tokens a call, each call under the next version."""

    def __init__(self, cuts: list[int], total: int) -> None:
        super().__init__()
        self.cuts, self.total = list(cuts), total

    async def generate(self, payload, routing_key=None):
        prompt, self.version = 3, self.version + 1
        done = len(payload["input_ids"]) - prompt
        left = min(self.total - done, payload["sampling_params"]["max_new_tokens"])
        cut = self.cuts.pop(0) if self.cuts else left
        reason = {"type": "abort", "message": ""} if cut < left else {"type": "stop", "matched": 1}
        if cut >= left and left < self.total - done:
            reason = {"type": "length", "length": left}
        tokens = [(7 * i) % 250 for i in range(done, done + min(cut, left))]
        return answer(tokens, len(payload["input_ids"]), reason, self.version)


@settings(max_examples=60, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 9), max_size=6), total=st.integers(1, 30), limit=st.integers(1, 30), mask=st.booleans()
)
def test_fields_stay_in_step(tmp_path_factory, cuts, total, limit, mask):
    directory = _directory(tmp_path_factory)
    pool = CutPool(cuts, total)
    state = GenerateState(make_args(directory, rollout_max_response_len=limit), pool, tokenizer=_TOKENIZER[0])
    sample = Sample(index=0, prompt="abc")
    stale = 0
    while sample.status in (SampleStatus.PENDING, SampleStatus.ABORTED):
        asyncio.run(generate(GenerateFnInput(state, sample, state.sampling_params)))
        sample.validate()
        if mask and sample.status is SampleStatus.ABORTED and sample.response_length:
            stale = sample.response_length
            sample.loss_mask = [0] * stale
    expected = min(total, limit)
    assert sample.response_length == expected
    assert sample.tokens[3:] == [(7 * i) % 250 for i in range(expected)]
    assert sample.loss_mask == [0] * stale + [1] * (expected - stale)
    assert sum(span.end - span.start for span in sample.version_spans) == expected
    versions = [span.version for span in sample.version_spans]
    assert versions == sorted(versions)
    assert (sample.status is SampleStatus.TRUNCATED) == (limit < total)
    sample.reward = 1.0
    columns = convert_samples_to_train_data(make_args(directory), [sample])
    assert int(columns["loss_masks"][0].sum()) == expected - stale


_TOKENIZER: list = []


def _directory(factory):
    """One tokenizer for all examples: hypothesis runs the body many times."""
    if not _TOKENIZER:
        from miles.rollout.prompts import load_tokenizer

        directory = write_tokenizer(factory.mktemp("m"))
        _TOKENIZER.extend([load_tokenizer(make_args(directory)), directory])
    return _TOKENIZER[1]
