"""Session settings that cannot work, found before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from miles.rollout.session.config import SessionConfig
from miles.rollout.session.serve import load_tito
from miles.rollout.tito.families import family_of
from miles.rollout.tito.matchers import resolve_matcher


def session_problems(args: Any) -> list[str]:
    """What is wrong with the run's session flags: one line a problem, with what to set; empty if nothing is."""
    problems = []
    for check in (lambda: family_of(args.tito_model), lambda: resolve_matcher(args.session_message_matcher)):
        try:
            check()
        except ValueError as error:
            problems.append(str(error))
    if problems or not Path(str(args.hf_checkpoint)).is_dir():
        return problems  # another rule reports a missing checkpoint
    try:
        load_tito(SessionConfig.from_args(args))
    except ValueError as error:
        problems.append(str(error))
    return problems
