"""A family's table, read in both directions: from a canonical Megatron name to Hugging Face names and back."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from miles.backends.megatron_utils.families.common import HEAD, TIED_HEAD
from miles.backends.megatron_utils.families.family import Entry, Family


def _pattern(template: str) -> re.Pattern[str]:
    """A regular expression with groups `layer` and `expert`."""
    text = re.escape(template)
    for field, what in (("layer", r"\d+"), ("expert", r"\d+"), ("beyond", r"\d+"), ("anything", r".+")):
        text = text.replace(re.escape("{" + field + "}"), f"(?P<{field}>{what})")
    return re.compile(f"^{text}$")


@dataclass(frozen=True)
class Mapping:
    """What one Megatron tensor is in the Hugging Face checkpoint."""

    entry: Entry
    layer: int | None
    expert: int | None

    def hf_names(self, expert: int | None = None) -> tuple[str, ...]:
        """Of another expert of the layer, if one is given."""
        chosen = self.expert if expert is None else expert
        return tuple(name.format(layer=self.layer, expert=chosen) for name in self.entry.hf)


class NameMap:
    """`family`'s table for a model of `num_layers` layers.

    Args:
        tied: the model's head is its embedding.
    """

    def __init__(self, family: Family, num_layers: int, *, tied: bool) -> None:
        entries = [TIED_HEAD if tied and entry == HEAD else entry for entry in family.entries]
        self.family, self.num_layers = family, num_layers
        self._rows = [(_pattern(entry.megatron), entry) for entry in entries]
        self._carried = [_pattern(name) for name in family.unused]
        self._copies = set(HEAD.hf) if tied else set()

    def of(self, canonical: str) -> Mapping | None:
        """What a canonical name stands for; None where the table has no row for it."""
        for pattern, entry in self._rows:
            if match := pattern.match(canonical):
                found = match.groupdict()
                layer, expert = found.get("layer"), found.get("expert")
                return Mapping(entry, None if layer is None else int(layer), None if expert is None else int(expert))
        return None

    def is_unused(self, hf_name: str) -> bool:
        """Whether the model does without this tensor of a checkpoint."""
        return hf_name in self._copies or self.is_carried(hf_name)

    def is_carried(self, hf_name: str) -> bool:
        """Whether it does without it and an export keeps it, as it is: it says nothing about what the model learns."""
        for pattern in self._carried:
            if match := pattern.match(hf_name):
                beyond = match.groupdict().get("beyond")
                if beyond is None or int(beyond) >= self.num_layers:
                    return True
        return False


class NameMapError(ValueError):
    """A model and a checkpoint that do not hold the same tensors."""


def check_complete(
    name_map: NameMap, megatron: Iterable[str], checkpoint: Iterable[str], wrong: Sequence[str], where: object
) -> None:
    """Raise NameMapError listing every tensor that only one side has, and what else is `wrong`.

    Args:
        megatron: canonical names of the whole model, over all ranks.
        checkpoint: names in the Hugging Face directory `where`.
    """
    checkpoint = set(checkpoint)
    needed: set[str] = set()
    unmapped = []
    for name in sorted(set(megatron)):
        mapping = name_map.of(name)
        if mapping is None:
            unmapped.append(name)
        else:
            needed.update(mapping.hf_names())
    problems = [f"no row of the {name_map.family.name} name map is for the model's {name}" for name in unmapped]
    problems += [f"the checkpoint lacks {name}" for name in sorted(needed - checkpoint)]
    left = sorted(name for name in checkpoint - needed if not name_map.is_unused(name))
    problems += [f"the model has no use for the checkpoint's {name}" for name in left]
    problems += wrong
    if problems:
        listed = "\n  ".join(problems)
        raise NameMapError(f"{where} and the model of its config.json do not match:\n  {listed}")
