"""`--check-weight-update-equal`: prove that an update writes every tensor, before a run relies on it.

Each engine's tensors are filled with noise, so that nothing that it loaded by itself can pass for delivered; then it is
updated, and its digests must be the trainer's. The reference is the trainer's own copy: the check holds at any version.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

from miles.backends.engine_api.client import EngineClient, EngineError
from miles.weight_update.transaction import Transaction, UpdateOutcome, UpdateSettings, clients_of
from miles.weight_update.types import EngineEndpoint, TransferReport


async def check_weight_update_equal(
    args: Any,
    version: int,
    engines: list[EngineEndpoint],
    transfer: Callable[[], Awaitable[TransferReport]],
) -> UpdateOutcome:
    """Fill with noise, update to `version`, compare. As `run_update`, which it replaces for one update.

    `--check-weight-update-selector` and `--check-weight-update-skip-list` (substrings of tensor names) limit the check.
    Unless every engine passes, none is committed and all are fenced: what they hold is noise, or in doubt.
    """
    settings = dataclasses.replace(
        UpdateSettings.from_args(args),
        verify=True,
        all_or_nothing=True,
        selector=args.check_weight_update_selector,
        skip=tuple(args.check_weight_update_skip_list or ()),
    )
    everyone = frozenset(e.index for e in engines)
    async with clients_of(engines, settings) as clients:
        failures: dict[int | None, str] = {}
        for index, client in clients.items():
            try:
                await fill_with_noise(client, settings)
            except EngineError as error:
                failures[index] = str(error)
        if failures:
            return UpdateOutcome(version, fenced=set(everyone), failures=failures)
        return await Transaction(settings, version, clients, transfer, doubtful=everyone).run()


async def fill_with_noise(client: EngineClient, settings: UpdateSettings) -> None:
    """Overwrite the engine's tensors. Raises EngineError if some stayed as they were: the check would then prove nothing."""
    before = await client.weights_checksums(timeout_s=settings.verify_s)
    skip = list(settings.skip) or None
    await client.weights_checker(
        "reset_tensors", skip_tensor_list=skip, selector=settings.selector, timeout_s=settings.verify_s
    )
    after = await client.weights_checksums(timeout_s=settings.verify_s)
    skipped = {name for name in before if any(part in name for part in settings.skip)}
    unchanged = sorted(name for name in before.keys() - skipped if after.get(name) == before[name])
    # Of draft or target tensors only, the other half stays as it is.
    if unchanged and (settings.selector == "all" or len(unchanged) == len(before.keys() - skipped)):
        raise EngineError(
            f"{client.base_url}/weights_checker reset_tensors left {len(unchanged)} tensors unchanged, first "
            f"{unchanged[0]}: comparing them after the update would prove nothing"
        )
