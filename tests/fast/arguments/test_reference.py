"""The reference page and the frozen list of flags."""

from __future__ import annotations

from pathlib import Path

from miles.arguments.args import FLAGS
from miles.arguments.reference import flag_list, flag_page

REPO = Path(__file__).resolve().parents[3]
FROZEN = Path(__file__).with_name("flags.txt")


def test_the_page_is_current():
    assert (REPO / "docs" / "flags.md").read_text() == flag_page(), (
        "run: python -m miles.arguments.reference > docs/flags.md"
    )


def test_no_flag_changes_unseen():
    """Public commands rely on names, kinds and defaults. A wanted change is made to flags.txt too."""
    frozen, now = set(FROZEN.read_text().splitlines()), set(flag_list().splitlines())
    assert (sorted(frozen - now), sorted(now - frozen)) == ([], [])


def test_the_page_names_every_flag():
    page = flag_page()
    missing = [f.name for f in FLAGS.values() if any(f"`{o}`" not in page for o in (*f.options, *f.off_options))]
    assert missing == []
