#!/usr/bin/env bash
# Style, layers, the fast tests, then real Ray runs on the CPU. The first failure ends it. Tests marked `nightly`, which take long
# on two cores, are left to scripts/nightly.sh.
#
#   bash scripts/test.sh [pytest options, e.g. -x -k resume]
#
# MILES_SCRIPT_VENV=... picks the virtual environment (.venv; made if it is not there).
# MILES_SCRIPT_TEST_WORKERS=... processes for the fast tests (2); files are never split between them.
# MILES_SCRIPT_TEST_SGLANG=1 installs real SGLang too (.venv-sglang) and runs its quick tests: one server, no whole run.
# Without it they are left out here, and run by scripts/nightly.sh.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh

venv="${MILES_SCRIPT_VENV:-.venv}"
ensure_venv "$venv" cpu,tasks,tracking,gguf,megatron,dev
export PATH="$(cd "$venv/bin" && pwd):$PATH"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

python scripts/fetch_chat_templates.py
ruff check .
ruff format --check .
mypy
lint-imports
python -m pytest -q tests/fast -m "not nightly" -n "${MILES_SCRIPT_TEST_WORKERS:-2}" --dist loadfile "$@"
if [ -n "${MILES_SCRIPT_TEST_SGLANG:-}" ]; then
    bash scripts/install_sglang_cpu.sh
    python -m pytest -q tests/e2e/sglang/test_parity.py tests/e2e/sglang/test_control.py "$@"
fi
python -m pytest -q tests/e2e -m "not nightly" --ignore tests/e2e/sglang "$@"
