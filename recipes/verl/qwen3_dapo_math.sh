#!/usr/bin/env bash
# Qwen3-8B on DAPO-Math-17k with the TROLL paper's settings, one machine or many. METHOD chooses the
# trust region; see common.sh.
#
#   .venv-verl/bin/python recipes/verl/prepare_data.py dapo-math --output data/dapo-math
#   PYTHON=.venv-verl/bin/python METHOD=troll NODES=4 GPUS=8 bash recipes/verl/qwen3_dapo_math.sh
#
# Before NODES > 1: `.venv-verl/bin/ray start --head` on this machine and `.venv-verl/bin/ray start
# --address=<it>:6379` on the others, each in an environment with the same versions.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

MODEL=${MODEL:-Qwen/Qwen3-8B}

launch dapo-math \
    data.max_prompt_length=2048 \
    data.max_response_length=4096 \
    data.truncation=left \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=12288 \
    actor_rollout_ref.actor.fsdp_config.param_offload=True \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    trainer.save_freq=20 \
    trainer.test_freq=10 \
    trainer.total_epochs=10 \
    "$@"
