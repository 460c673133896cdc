"""SFT rows become finished samples."""

from __future__ import annotations

import pytest

from miles.rollout.base_types import RolloutFnConstructorInput, RolloutFnEvalInput, RolloutFnTrainInput
from miles.rollout.compat import load_rollout_function
from miles.rollout.data_source import RolloutDataSourceWithBuffer
from miles.rollout.postprocess import postprocess_rollout
from miles.rollout.train_data import convert_samples_to_train_data
from tests.fast.rollout.fakes import make_args, write_jsonl

PATH = "miles.rollout.sft_rollout.generate_rollout"


def build(model_dir, tmp_path, rows, **overrides):
    data = write_jsonl(tmp_path / "sft.jsonl", rows)
    fields = {
        "prompt_data": data,
        "n_samples_per_prompt": 1,
        "rollout_batch_size": len(rows),
        "global_batch_size": len(rows),
    }
    args = make_args(
        model_dir, **{**fields, "advantage_estimator": "grpo", "rewards_normalization": False, **overrides}
    )
    source = RolloutDataSourceWithBuffer(args)
    return args, load_rollout_function(PATH, RolloutFnConstructorInput(args=args, data_source=source))


def text(args, sample, masked):
    from miles.rollout.prompts import load_tokenizer

    tokenizer = load_tokenizer(args)
    response = sample.tokens[-sample.response_length :]
    return tokenizer.decode([t for t, m in zip(response, sample.loss_mask, strict=True) if m == masked])


async def test_conversations_learn_all_assistant_turns(model_dir, tmp_path):
    rows = [
        {"messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "hello"},
            {"role": "user", "content": "bye"},
            {"role": "assistant", "content": "ciao"},
        ]}
    ]  # fmt: skip
    args, rollout = build(model_dir, tmp_path, rows, input_key="messages", label_key=None)
    output = await rollout(RolloutFnTrainInput(0))
    (sample,) = output.samples[0]
    assert text(args, sample, 1) == "hello<|im_end|>ciao<|im_end|>"
    assert text(args, sample, 0) == "\n<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n\n"
    columns = convert_samples_to_train_data(args, *postprocess_rollout(args, output.samples))
    assert columns["rewards"] == [0.0]
    assert int(columns["loss_masks"][0].sum()) == columns["rollout_mask_sums"][0] == len("hellociao") + 2


async def test_prompt_and_label_rows_learn_the_label_and_its_end(model_dir, tmp_path):
    args, rollout = build(model_dir, tmp_path, [{"input": "2+2=", "label": "4"}])
    (sample,) = (await rollout(RolloutFnTrainInput(0))).samples[0]
    assert text(args, sample, 1) == "4<|im_end|>"
    assert len(sample.tokens) == len("2+2=") + 2


async def test_rows_that_teach_nothing_are_named(model_dir, tmp_path):
    _, rollout = build(model_dir, tmp_path, [{"input": "2+2="}], label_key=None)
    with pytest.raises(ValueError, match="SFT sample 0: a string prompt needs a response: set --label-key"):
        await rollout(RolloutFnTrainInput(0))
    rows = [{"messages": [{"role": "user", "content": "hi"}]}]
    _, rollout = build(model_dir, tmp_path, rows, input_key="messages", label_key=None)
    with pytest.raises(ValueError, match="SFT sample 0: the conversation has no assistant message"):
        await rollout(RolloutFnTrainInput(0))


async def test_a_sequence_beyond_the_context_is_an_error_not_a_cut(model_dir, tmp_path):
    _, rollout = build(model_dir, tmp_path, [{"input": "2+2=", "label": "4" * 30}], rollout_max_context_len=20)
    with pytest.raises(ValueError, match="SFT sample 0: 35 tokens, --rollout-max-context-len is 20"):
        await rollout(RolloutFnTrainInput(0))


async def test_there_is_no_sft_evaluation(model_dir, tmp_path):
    _, rollout = build(model_dir, tmp_path, [{"input": "2+2=", "label": "4"}])
    with pytest.raises(ValueError, match="--eval-function-path"):
        await rollout(RolloutFnEvalInput(0))
