#!/usr/bin/env bash
# Every check and test, the same that CI runs: lint, format, types, rooms, tests, and those against a real SGLang server, whose
# environment is made if there is none (ASYNCRL_SKIP_SGLANG=1 leaves them out). Ends with the names of the stages that failed.
# The long runs carry markers and are run by hand: pytest -m long.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
use_environment "dev"
cd "$repository"

failed=()
stage() {
  local name="$1" began=$SECONDS
  shift
  echo "── $name: $*"
  if "$@"; then echo "── $name: ok ($((SECONDS - began)) s)"; else echo "── $name: FAILED ($((SECONDS - began)) s)"; failed+=("$name"); fi
}

stage lint ruff check
stage format ruff format --check
stage types mypy
stage rooms lint-imports
stage tests pytest -m "not long and not sglang and not gpu" "$@"
if [ -z "${ASYNCRL_SKIP_SGLANG:-}" ]; then
  stage sglang-environment bash deploy/sglang-cpu/install.sh
  stage sglang pytest -m "sglang and not long" "$@"
fi

if [ ${#failed[@]} -gt 0 ]; then
  echo "FAILED: ${failed[*]}"
  exit 1
fi
echo "all stages passed"
