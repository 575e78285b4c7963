#!/usr/bin/env bash
# An environment in which a real SGLang server runs without a GPU: the repository's .venv-sglang, or the folder given. Pinned, and
# made anew only when something here has changed. It holds asyncrl too (--no-deps), whose receiver runs inside the server.
#   bash deploy/sglang-cpu/install.sh [FOLDER]
# Then: asyncrl launch pipelines/quickstart_sglang_cpu.yaml
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
repository="$(cd "$here/../.." && pwd)"
folder="${1:-$repository/.venv-sglang}"
wanted="$(cat "$here/install.sh" "$here/requirements.txt" "$repository/pyproject.toml" | sha256sum | cut -d' ' -f1) $repository"
if [ "$(cat "$folder/asyncrl-installed" 2>/dev/null)" = "$wanted" ]; then
  echo "$folder is up to date"
  exit 0
fi
if [ ! -x "$folder/bin/python" ]; then
  echo "making $folder"
  "${PYTHON:-python3}" -c 'import sys; sys.exit("SGLang needs Python 3.11 or newer; set PYTHON to one" if sys.version_info < (3, 11) else 0)'
  "${PYTHON:-python3}" -m venv "$folder"
fi
echo "installing SGLang 0.5.23 for a CPU (2 GB, a few minutes)"
pip() { "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }
pip torch==2.13.0
pip -r "$here/requirements.txt"
pip --no-deps sglang==0.5.23 triton==3.7.0 compressed-tensors==0.18.0 xgrammar==0.2.7
pip setuptools
pip --no-deps --no-build-isolation -e "$repository"
"$folder/bin/python" "$here/launch.py" --help > /dev/null
echo "$wanted" > "$folder/asyncrl-installed"
echo "SGLang for a CPU is in $folder"
