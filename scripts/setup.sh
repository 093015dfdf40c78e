#!/usr/bin/env bash
# Make the virtual environment and install the project into it from pinned constraints.
#
#     scripts/setup.sh [dev]       dev: with what the tests and checks need
#
# Does nothing when the environment is up to date. Settings, from the environment:
#     VENV             the environment's folder (default: .venv in the repository)
#     PYTHON           what to make it with (default: the first Python >= 3.11 on the PATH)
#     TORCH_CPU_INDEX  where PyTorch's CPU builds are (default: PyTorch's own index)
# Exit code 2, with one line that names the Debian packages, when something is missing.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$(realpath -m "${VENV:-$root/.venv}")
cpu_index=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}
extra=${1:-}

die() {
  echo "setup: $1" >&2
  exit 2
}

# Names are tried by running them: a launcher on the PATH need not have a Python behind it.
is_recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
  local name
  if [[ -n ${PYTHON:-} ]]; then
    is_recent "$PYTHON" || die "PYTHON=$PYTHON is not a Python 3.11 or newer: name another"
    echo "$PYTHON"
    return
  fi
  for name in python3 python3.11 python3.12 python3.13 python3.14; do
    if is_recent "$name"; then
      echo "$name"
      return
    fi
  done
  die "no Python 3.11 or newer on the PATH: apt-get install python3.11 python3.11-venv python3.11-dev"
}

# Print the Debian packages that are missing, before anything is made.
missing_packages() {
  command -v "${CXX:-g++}" >/dev/null || echo g++
  "$1" - "$venv" <<'EOF'
import importlib.util
import subprocess
import sys
import sysconfig
from pathlib import Path

version = "{}.{}".format(*sys.version_info)
try:
    default = subprocess.check_output(["/usr/bin/python3", "-V"], text=True).split()[1]
except (OSError, subprocess.CalledProcessError):
    default = version
name = "python3" if default.startswith(f"{version}.") else f"python{version}"
made = sys.executable.startswith(f"{sys.argv[1]}/")
if not made and not all(map(importlib.util.find_spec, ("venv", "ensurepip"))):
    print(f"{name}-venv")
if not Path(sysconfig.get_path("include"), "Python.h").exists():
    print(f"{name}-dev")
EOF
}

has_nvidia_driver() { [[ -e /proc/driver/nvidia/version ]] || command -v nvidia-smi >/dev/null; }

# Without a GPU the CPU build of torch is a twentieth of the download. Three seconds to answer.
answers() {
  timeout 3 "$python" -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1])' \
    "$1/torch/" >/dev/null 2>&1
}

[[ $extra == "" || $extra == dev ]] || die "unknown argument '$extra': give dev, or nothing"

installed=""
if is_recent "$venv/bin/python"; then
  python=$venv/bin/python
  installed=$(cat "$venv/.fp8train-setup" 2>/dev/null || true)
else
  python=$(find_python)
fi
missing=$(missing_packages "$python")
[[ -z $missing ]] || die "missing on this machine: apt-get install ${missing//$'\n'/ }"

# What the installation depends on; the folder is part of it because the install is editable.
digest=$(cat "$root/pyproject.toml" "$root/constraints.txt" - <<<"$root" | sha256sum | cut -d' ' -f1)
if [[ $installed == "$digest dev" || $installed == "$digest $extra" ]]; then
  exit 0
fi

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  echo "setup: making $venv with $("$python" -V)"
  clear=()
  [[ ! -e $venv/pyvenv.cfg ]] || clear=(--clear)  # a broken one; never another folder
  "$python" -m venv "${clear[@]}" "$venv"
fi
rm -f "$venv/.fp8train-setup"

options=(--prefer-binary --use-pep517 --no-compile --disable-pip-version-check)
[[ -t 1 ]] || options+=(-qq)
if ! has_nvidia_driver; then
  if answers "$cpu_index"; then
    options+=(--extra-index-url "$cpu_index")
  else
    echo "setup: $cpu_index does not answer; torch comes from pip's own index"
  fi
fi
echo "setup: installing the packages of constraints.txt; the first time takes a few minutes"
# By environment and not by option, because that reaches the build tools of source packages too.
# Relative, because pip splits the value at spaces.
cd "$root"
PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
  "$venv/bin/python" -m pip install "${options[@]}" --editable ".${extra:+[$extra]}"
# A run's imports, once: proof that they work, and they leave their bytecode behind. That is a
# third of the files, hence --no-compile: pip would compile them all, one after the other.
env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" -c "
import datasets, hydra, matplotlib.figure, rich, tokenizers, wandb
import torch._dynamo, torch.distributed.checkpoint, torch.distributed.fsdp"
echo "$digest $extra" >"$venv/.fp8train-setup"
echo "setup: done in $SECONDS s"
