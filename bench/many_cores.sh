#!/usr/bin/env bash
# Measures a machine with 16 cores or more, in at most ten minutes: HalfCheetah, Ant and Pong with 8 and 16 workers against
# Gymnasium's engines and the bare loop, then PPO on Pong, whose learner uses a GPU where JAX finds one.
#
#     bench/many_cores.sh [FOLDER]     # tables on stdout, JSON files in FOLDER (default: bench-results)
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-bench-results}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export XLA_PYTHON_CLIENT_PREALLOCATE=false # each engine is measured in a process of its own, and all share one GPU
for workers in 8 16; do
  python3 -m bench compare --workloads HalfCheetah-v5,Ant-v5,ALE/Pong-v5 --num-envs 32 --workers "$workers" \
    --engines workers,use-caller,first-ready,gym-sync,gym-async,bare-loop --seconds 0.4 --repeats 7 --out "$out/$workers-workers"
done
python3 -m bench train --workloads pong --num-envs 32 --workers 16 --engines workers,halves,gym-sync,gym-async \
  --seconds 4 --repeats 5 --out "$out/train"
