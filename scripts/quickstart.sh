#!/usr/bin/env bash
# From nothing to two trained models: set up the environment, train the small Llama in FP8 and in
# BF16 on two processes, and compare them: a table, and a picture of both loss curves.
#
#     scripts/quickstart.sh [key=value ...]       for example trainer.steps=50 precision=fp8_block
#
# Writes to outputs/ in the current folder. Settings from the environment: see scripts/setup.sh.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$(realpath -m "${VENV:-$root/.venv}")
export VENV

"$root/scripts/setup.sh"
export PATH="$VENV/bin:$PATH"
exec python "$root/launch/compare.py" +recipe=llama_fp8 baseline=bf16 run.overwrite=true "$@"
