#!/usr/bin/env bash
# Compares vecenv with Gymnasium's engines and the bare loop on a machine with 16 cores or more, in at most ten minutes:
# HalfCheetah, Ant and Pong with 8 and 16 workers, then PPO on Pong, with the learner on a GPU if JAX finds one.
#
#     bench/many_cores.sh [FOLDER]     # tables on stdout, JSON files in FOLDER (default: bench-results)
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-bench-results}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export XLA_PYTHON_CLIENT_PREALLOCATE=false # all engines' processes share one GPU, and the first would take most of its memory
for workers in 8 16; do
  python3 -m bench compare --workloads HalfCheetah-v5,Ant-v5,ALE/Pong-v5 --num-envs 32 --workers "$workers" \
    --engines workers,use-caller,first-ready,gym-sync,gym-async,bare-loop --seconds 0.4 --repeats 7 --out "$out/$workers-workers"
done
python3 -m bench train --workloads pong --num-envs 32 --workers 16 --engines workers,halves,gym-sync,gym-async \
  --seconds 4 --repeats 5 --out "$out/train"
