#!/usr/bin/env bash
# Set up the environment and run the tests.
#
#     scripts/test.sh [--fast] [pytest's own arguments]       --fast: without those marked slow
#
# The exit code is pytest's. Settings from the environment: see scripts/setup.sh.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$(realpath -m "${VENV:-$root/.venv}")
export VENV

arguments=()
for argument in "$@"; do
  if [[ $argument == --fast ]]; then
    arguments+=(-m "not slow")
  else
    arguments+=("$argument")
  fi
done

"$root/scripts/setup.sh" dev
export PATH="$VENV/bin:$PATH"
cd "$root"
exec python -m pytest "${arguments[@]}"
