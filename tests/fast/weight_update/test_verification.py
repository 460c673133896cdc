"""Which differences between trainer and engine are found, and how they are told."""

from __future__ import annotations

from miles.weight_update.types import TensorRecord
from miles.weight_update.verification import Problem, compare, describe


def manifest(**digests: str) -> dict[str, TensorRecord]:
    return {name.replace("__", "."): TensorRecord("float32", (2, 3), d) for name, d in digests.items()}


def test_equal_digests_are_no_mismatch():
    assert compare(manifest(a="1", b="2"), {"b": "2", "a": "1"}) == []


def test_missing_unexpected_and_different_tensors_are_all_found():
    found = compare(manifest(a="1", b="2", c="3"), {"a": "1", "b": "9", "d": "3"})
    assert [(m.name, m.problem) for m in found] == [
        ("b", Problem.DIFFERENT),
        ("c", Problem.MISSING),
        ("d", Problem.UNEXPECTED),
    ]
    assert "sent float32 [2, 3] with digest 2, engine has 9" in str(found[0])


def test_a_tied_embedding_may_be_listed_by_either_side_but_must_be_equal():
    embedding = {"model.embed_tokens.weight": "1"}
    both = embedding | {"lm_head.weight": "1"}
    sent_both = manifest(model__embed_tokens__weight="1", lm_head__weight="1")
    sent_one = manifest(model__embed_tokens__weight="1")
    assert compare(sent_both, embedding) == [] and compare(sent_one, both) == []
    assert [m.problem for m in compare(sent_one, embedding | {"lm_head.weight": "2"})] == [Problem.UNEXPECTED]
    untied = manifest(model__embed_tokens__weight="1", lm_head__weight="2")
    assert [m.problem for m in compare(untied, embedding)] == [Problem.MISSING]
    # Equal bytes excuse nothing else: fresh norms are all ones.
    assert [m.problem for m in compare(manifest(n1__weight="1", n2__weight="1"), {"n1.weight": "1"})] == [
        Problem.MISSING
    ]


def test_a_long_list_is_capped_with_the_number_of_the_rest():
    found = compare(manifest(**{f"t{i:03}": "1" for i in range(50)}), {})
    text = describe(found, 60)
    assert text.startswith("50 of 60 tensors") and text.endswith("... and 30 more") and text.count("\n") == 21
