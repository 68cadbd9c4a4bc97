# What the launch scripts share: method, cluster and paths as Hydra overrides of verl's trainer.
#
# Environment:
#   METHOD   troll (default), clip, gspo, gspo-troll, dppo
#   MODEL    a Hugging Face name or folder
#   DATA     the folder that prepare_data.py filled
#   NODES, GPUS   machines, and GPUs on each
#   OUTPUT   where checkpoints go
#   PYTHON   of the environment that verl is installed in (default: python3)
#   DRY_RUN=1     print the overrides, one a line, and start nothing

METHOD=${METHOD:-troll}
NODES=${NODES:-1}
GPUS=${GPUS:-8}
PYTHON=${PYTHON:-python3}

# The trust region. Everything else is the same for all methods.
method_overrides() {
    case "$METHOD" in
        troll | gspo-troll)
            printf '%s\n' \
                +tether=troll \
                actor_rollout_ref.actor.policy_loss.troll_kl_bound=0.05 \
                actor_rollout_ref.actor.policy_loss.troll_alpha=1.0
            if [ "$METHOD" = gspo-troll ]; then
                printf '%s\n' \
                    actor_rollout_ref.actor.policy_loss.troll_ratio=sequence \
                    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean
            fi
            ;;
        clip) # PPO's clip with a dual clip at 10
            printf '%s\n' \
                actor_rollout_ref.actor.policy_loss.loss_mode=vanilla \
                actor_rollout_ref.actor.clip_ratio=0.2 \
                actor_rollout_ref.actor.clip_ratio_low=0.2 \
                actor_rollout_ref.actor.clip_ratio_high=0.2 \
                actor_rollout_ref.actor.clip_ratio_c=10.0
            ;;
        gspo)
            printf '%s\n' \
                actor_rollout_ref.actor.policy_loss.loss_mode=gspo \
                actor_rollout_ref.actor.clip_ratio_low=0.0003 \
                actor_rollout_ref.actor.clip_ratio_high=0.0004 \
                actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean
            ;;
        dppo) # binary total variation; verl reads its bounds from the clip's keys
            printf '%s\n' \
                actor_rollout_ref.actor.policy_loss.loss_mode=dppo_tv \
                actor_rollout_ref.actor.clip_ratio_low=0.15 \
                actor_rollout_ref.actor.clip_ratio_high=0.15 \
                actor_rollout_ref.actor.clip_ratio_c=20.0
            ;;
        *)
            echo "METHOD=$METHOD is unknown; choose troll, clip, gspo, gspo-troll or dppo." >&2
            return 1
            ;;
    esac
}

# The settings of the TROLL paper's runs: GRPO, 8 updates on each batch of 256 x 8 responses.
paper_overrides() {
    printf '%s\n' \
        algorithm.adv_estimator=grpo \
        algorithm.use_kl_in_reward=False \
        data.train_batch_size=256 \
        actor_rollout_ref.rollout.n=8 \
        actor_rollout_ref.rollout.temperature=1.0 \
        actor_rollout_ref.actor.ppo_mini_batch_size=32 \
        actor_rollout_ref.actor.ppo_epochs=1 \
        actor_rollout_ref.actor.optim.lr=1e-6 \
        actor_rollout_ref.actor.optim.weight_decay=0.0 \
        actor_rollout_ref.actor.optim.lr_scheduler_type=constant \
        actor_rollout_ref.actor.grad_clip=1.0 \
        actor_rollout_ref.actor.use_kl_loss=False \
        actor_rollout_ref.actor.entropy_coeff=0
}

# Where the engines put the model. FSDP2 shards over all GPUs of all machines.
engine_overrides() {
    printf '%s\n' \
        actor_rollout_ref.actor.strategy=fsdp2 \
        actor_rollout_ref.ref.strategy=fsdp2 \
        actor_rollout_ref.model.use_remove_padding=True \
        actor_rollout_ref.model.use_fused_kernels=False \
        actor_rollout_ref.model.enable_gradient_checkpointing=True \
        actor_rollout_ref.actor.use_dynamic_bsz=True \
        actor_rollout_ref.rollout.name=vllm \
        actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
        actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
        trainer.use_v1=True \
        trainer.n_gpus_per_node="$GPUS" \
        trainer.nnodes="$NODES"
}

# What a run reads and writes, by the recipe's name.
run_overrides() {
    local name=$1 data=${DATA:-data/$1}
    printf '%s\n' \
        actor_rollout_ref.model.path="$MODEL" \
        data.train_files="$data/train.parquet" \
        data.val_files="$data/test.parquet" \
        data.filter_overlong_prompts=True \
        trainer.project_name=tether \
        trainer.experiment_name="$name-$METHOD" \
        trainer.logger='["console","tensorboard"]' \
        trainer.default_local_dir="${OUTPUT:-runs/verl/$name-$METHOD}"
}

launch() { # the recipe's name, its own overrides, then the command line's: later ones win
    local name=$1 method overrides
    shift
    method=$(method_overrides) # on a line of its own, where its failure ends the script
    mapfile -t overrides < <(paper_overrides && engine_overrides && run_overrides "$name" && echo "$method")
    set -- "${overrides[@]}" "$@"
    if [ -n "${DRY_RUN:-}" ]; then
        printf '%s\n' "$@"
        return
    fi
    if [ "$NODES" -gt 1 ] && ! "$PYTHON" -m ray.scripts.scripts status >/dev/null 2>&1; then
        echo "NODES=$NODES needs a running Ray cluster: 'ray start --head' here, then 'ray start" \
            "--address=<this host>:6379' on each other machine." >&2
        return 1
    fi
    exec "$PYTHON" -m verl.trainer.main_ppo "$@"
}
