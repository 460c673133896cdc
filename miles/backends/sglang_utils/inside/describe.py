"""Prints, as one JSON line, what the SGLang of this interpreter is: its version, and every option that its server takes."""

from __future__ import annotations

import argparse
import importlib.metadata
import json


def describe() -> dict:
    """`options`: for each option string its field (`dest`), how many values it takes, and which, where they are limited.

    `values` is 0 for a switch, 1, or "many".
    """
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(parser)
    options = {}
    for action in parser._actions:
        values: int | str = 1 if action.nargs in (None, "?") else 0 if action.nargs == 0 else "many"
        choices = sorted(map(str, action.choices)) if action.choices is not None else None
        for option in action.option_strings:
            options[option] = {"field": action.dest, "values": values, "choices": choices}
    return {"version": importlib.metadata.version("sglang"), "options": options}


if __name__ == "__main__":
    print("\n" + json.dumps(describe()))
