# Sourced by quickstart.sh and test.sh: a virtual environment with the pinned versions of deploy/constraints-cpu.txt, in the
# repository's .venv. PYTHON names the interpreter that makes it (3.11 or newer). Nothing is installed when nothing has changed.
set -euo pipefail
repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# use_environment EXTRAS: EXTRAS as in pip's brackets, or empty.
use_environment() {
  local extras="$1" python="$repository/.venv/bin/python" stamp="$repository/.venv/asyncrl-installed" wanted
  if [ ! -x "$python" ]; then
    echo "making $repository/.venv"
    "${PYTHON:-python3}" -c 'import sys; sys.exit("asyncrl needs Python 3.11 or newer; set PYTHON to one" if sys.version_info < (3, 11) else 0)'
    "${PYTHON:-python3}" -m venv "$repository/.venv"
  fi
  wanted="$(cat "$repository/pyproject.toml" "$repository/deploy/constraints-cpu.txt" | sha256sum | cut -d' ' -f1)"
  if ! grep -qsxF "$wanted [$extras]" "$stamp"; then
    echo "installing asyncrl with the versions of deploy/constraints-cpu.txt (a few minutes the first time)"
    "$python" -m pip install --quiet --disable-pip-version-check -c "$repository/deploy/constraints-cpu.txt" \
      -e "$repository${extras:+[$extras]}"
    { grep -sF "$wanted " "$stamp" || true; echo "$wanted [$extras]"; } > "$stamp.new"
    if [ -n "$extras" ]; then echo "$wanted []" >> "$stamp.new"; fi
    mv "$stamp.new" "$stamp"
  fi
  export PATH="$repository/.venv/bin:$PATH" VIRTUAL_ENV="$repository/.venv" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
}
