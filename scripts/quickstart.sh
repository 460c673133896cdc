#!/usr/bin/env bash
# From a fresh checkout to a policy that learns: makes .venv, installs, and runs recipes/quickstart.sh on the CPU.
#
#   bash scripts/quickstart.sh [flags of train.py for the RL run, e.g. --num-rollout 20]
#
# Needs Python 3.11 or newer. Can be run again: what is there is not made twice, and each run gets a folder of its own.
# PYTHON=... picks the interpreter, MILES_SCRIPT_VENV=... the virtual environment; recipes/quickstart.sh has more.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh

venv="${MILES_SCRIPT_VENV:-.venv}"
ensure_venv "$venv" cpu,tasks
MILES_SCRIPT_PYTHON="$venv/bin/python" exec bash recipes/quickstart.sh "$@"
