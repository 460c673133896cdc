#!/usr/bin/env bash
# Everything that continuous integration has no time for: real SGLang in an environment of its own, Ray's job server, and every
# end-to-end test with them. About an hour on two cores.
#
#   bash scripts/nightly.sh [pytest options]
#
# MILES_SCRIPT_VENV        the virtual environment of miles     (.venv-nightly)
# MILES_SCRIPT_SGLANG_VENV that of SGLang                       (.venv-sglang)
# MILES_TEST_SGLANG_PYTHON an interpreter that has SGLang already; nothing is installed for it then
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh

venv="${MILES_SCRIPT_VENV:-.venv-nightly}"
ensure_venv "$venv" cpu,tasks,tracking,gguf,jobs,megatron,dev
if [ -z "${MILES_TEST_SGLANG_PYTHON:-}" ]; then
    sglang="${MILES_SCRIPT_SGLANG_VENV:-.venv-sglang}"
    bash scripts/install_sglang_cpu.sh "$sglang"
    export MILES_TEST_SGLANG_PYTHON="$(cd "$sglang/bin" && pwd)/python"
fi
export PATH="$(cd "$venv/bin" && pwd):$PATH"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

python -m pytest -q tests/fast -m nightly --durations=25 "$@"
python -m pytest -q tests/e2e --durations=25 "$@"
