#!/usr/bin/env bash
# Qwen3-0.6B on GSM8K, one machine. METHOD chooses the trust region; see common.sh.
#
#   python3 recipes/verl/prepare_data.py gsm8k --output data/gsm8k
#   METHOD=troll GPUS=8 bash recipes/verl/qwen3_gsm8k.sh trainer.total_epochs=10
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

MODEL=${MODEL:-Qwen/Qwen3-0.6B}
DATA=${DATA:-data/gsm8k}
OUTPUT=${OUTPUT:-runs/verl/gsm8k-$METHOD}

method=$(method_overrides)
mapfile -t overrides < <(paper_overrides && engine_overrides && echo "$method")
launch "${overrides[@]}" \
    actor_rollout_ref.model.path="$MODEL" \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.max_prompt_length=512 \
    data.max_response_length=1024 \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
    trainer.project_name=tether \
    trainer.experiment_name="gsm8k-$METHOD" \
    trainer.logger='["console","tensorboard"]' \
    trainer.default_local_dir="$OUTPUT" \
    trainer.save_freq=50 \
    trainer.test_freq=10 \
    trainer.total_epochs=15 \
    "$@"
