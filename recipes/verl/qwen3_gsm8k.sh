#!/usr/bin/env bash
# Qwen3-0.6B on GSM8K, one machine. METHOD chooses the trust region; see common.sh.
#
#   .venv-verl/bin/python recipes/verl/prepare_data.py gsm8k --output data/gsm8k
#   PYTHON=.venv-verl/bin/python METHOD=troll GPUS=8 bash recipes/verl/qwen3_gsm8k.sh trainer.total_epochs=10
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

MODEL=${MODEL:-Qwen/Qwen3-0.6B}

launch gsm8k \
    data.max_prompt_length=512 \
    data.max_response_length=1024 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
    trainer.save_freq=50 \
    trainer.test_freq=10 \
    trainer.total_epochs=15 \
    "$@"
