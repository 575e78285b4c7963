#!/usr/bin/env bash
# A language model learns by asynchronous RL, in about a minute on two cores. Options go to `asyncrl launch`:
#   bash deploy/quickstart.sh --run-dir runs/first --set training.steps=100
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
use_environment ""
exec asyncrl launch "$repository/pipelines/quickstart.yaml" "$@"
