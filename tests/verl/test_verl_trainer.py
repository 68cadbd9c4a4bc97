"""verl's trainers from start to end on CPU: rollouts, rewards, TROLL, weights back to the server.

`fit` is verl's own, and so is everything it calls, on Ray and TransferQueue. Ours are a rollout server on CPU
in verl's registry of rollouts, and a worker that meets its peers over gloo.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tether.llm.models import embedded_model_path
from tether.llm.tasks.chained import ChainedTask

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # half a minute a step where two cores are shared

ray = pytest.importorskip("ray")

HERE = Path(__file__).parent
STEPS, PROMPTS, SAMPLES = 12, 16, 8
SETTINGS = f"""
actor_rollout_ref.model.path={embedded_model_path()}
actor_rollout_ref.actor.policy_loss.troll_kl_bound=0.05
+actor_rollout_ref.model.override_config.attn_implementation=sdpa
actor_rollout_ref.model.enable_gradient_checkpointing=False
actor_rollout_ref.actor.strategy=fsdp2
actor_rollout_ref.actor.fsdp_config.use_torch_compile=False
actor_rollout_ref.actor.fsdp_config.model_dtype=fp32
+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32
actor_rollout_ref.actor.ppo_mini_batch_size=4
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32
actor_rollout_ref.actor.optim.lr=1e-4
actor_rollout_ref.rollout.name=cpu
actor_rollout_ref.rollout.n={SAMPLES}
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32
actor_rollout_ref.rollout.free_cache_engine=False
actor_rollout_ref.rollout.tensor_model_parallel_size=1
actor_rollout_ref.rollout.agent.num_workers=1
transfer_queue.backend.SimpleStorage.num_data_storage_units=1
transfer_queue.backend.SimpleStorage.total_storage_size=2000
reward.num_workers=1
reward.custom_reward_function.path={HERE / "chained_reward.py"}
data.train_batch_size={PROMPTS}
data.max_prompt_length=32
data.max_response_length=48
data.dataloader_num_workers=0
trainer.device=cpu
trainer.n_gpus_per_node=1
trainer.nnodes=1
trainer.logger=["file"]
trainer.val_before_train=False
trainer.total_training_steps={STEPS}
trainer.total_epochs=1
trainer.resume_mode=disable
algorithm.adv_estimator=grpo
"""
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    variables = {
        **{name: value for name, value in os.environ.items() if name.startswith("VERL_")},
        "PYTHONPATH": str(HERE),
        "OMP_NUM_THREADS": "1",
        "TRANSFER_QUEUE_ENABLE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
    }
    monkeypatch.setenv("TRANSFER_QUEUE_ENABLE", "1")
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    # verl counts GPUs or NPUs before it starts; what its workers ask for are the platform's, CPUs.
    ray.init(
        num_cpus=8,
        resources={"NPU": 2},
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": variables},
        object_store_memory=200 * 2**20,
    )
    yield
    ray.shutdown()


def _write_data(folder: Path) -> list[str]:
    from datasets import Dataset

    files = []
    for split, name, count in (("train", "train", STEPS * PROMPTS), ("validation", "val", 8)):
        rows = [
            {
                "data_source": "chained",
                "prompt": [{"role": "user", "content": problem.prompt}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": problem.answer},
                "extra_info": {"index": index, "split": split},
            }
            for index, problem in enumerate(ChainedTask().problems(split, limit=count))
        ]
        Dataset.from_list(rows).to_parquet(str(folder / f"{name}.parquet"))
        files.append(f"data.{name}_files={folder / name}.parquet")
    return files


def _config(folder: Path, *more: str) -> Any:
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    local = [*_write_data(folder), f"trainer.default_local_dir={folder}/checkpoints"]
    overrides = [*SETTINGS.split(), *local, *more]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides)
    OmegaConf.set_struct(config, False)
    config.actor_rollout_ref.model.custom_chat_template = TEMPLATE
    config.transfer_queue.enable = True
    OmegaConf.resolve(config)
    return config


def _train(config: Any, folder: Path) -> list[dict[str, Any]]:
    """verl's `fit`, as its `main_ppo` calls it; returns what each step logged."""
    import transfer_queue as queue
    from cpu_worker import CPUActorWorker
    from verl.trainer.ppo.v1 import get_trainer_cls

    class CPUTrainer(get_trainer_cls(config.trainer.v1.trainer_mode)):  # type: ignore[misc]
        def _init_resource_pool_mgr(self) -> None:
            super()._init_resource_pool_mgr()
            self.role_worker_mapping = dict.fromkeys(self.role_worker_mapping, ray.remote(CPUActorWorker))

    queue.init(config.transfer_queue)
    try:
        _fit(CPUTrainer(config=config), config)
    finally:
        queue.close()  # or the next test would ask the actors of this one
    steps = [json.loads(line)["data"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == STEPS
    return steps


def _fit(trainer: Any, config: Any) -> None:
    from verl.trainer.ppo.v1 import AgentLoopManagerTQ
    from verl.utils.import_utils import load_class_from_fqn

    trainer.init()
    named = config.actor_rollout_ref.rollout.agent.get("agent_loop_manager_class")
    manager = load_class_from_fqn(named, "AgentLoopManager") if named else AgentLoopManagerTQ
    trainer.fit(
        manager.create(
            config=config,
            llm_client=trainer.get_llm_client(),
            teacher_client=trainer.get_teacher_client(),
            reward_loop_worker_handles=trainer.get_reward_handles(),
        )
    )


def _assert_learnt(steps: list[dict[str, Any]]) -> None:
    rewards = [step["critic/rewards/mean"] for step in steps]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.05, rewards


def test_the_trainer_learns_the_embedded_task(tmp_path: Path, cluster: None) -> None:
    steps = _train(_config(tmp_path, "+tether=troll"), tmp_path)
    _assert_learnt(steps)
    for step in steps:
        # The server samples with the weights that were trained last.
        assert step["training/rollout_probs_diff_max"] < 1e-4
        assert 0 < step["actor/troll/kl_mean"] < step["actor/troll/kl_max"]
        assert 0 <= step["actor/troll/projected"] < 0.2
        assert step["actor/troll/certified"] > 0.9


UPDATES = PROMPTS // 4
ASYNC = ["trainer.v1.trainer_mode=colocate_async", "trainer.v1.colocate_async.num_warmup_batches=1"]


SEPARATE = [
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.num_warmup_batches=1",
    f"trainer.v1.separate_async.parameter_sync_step={UPDATES}",
    "actor_rollout_ref.hybrid_engine=False",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=cpu",
    "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=cpu_checkpoints",
]


@pytest.mark.parametrize(
    ("mode", "lag"),
    [([], 0), (ASYNC, UPDATES), (SEPARATE, UPDATES)],
    ids=["sync", "colocate_async", "separate_async"],
)
def test_around_the_sampler(tmp_path: Path, cluster: None, mode: list[str], lag: int) -> None:
    """No scoring pass; the records are of the tokens, and the lags those of the weights that sampled them.

    Asynchronously a batch is always under way while one is trained on: its answers are interrupted, and end
    under the next weights.
    """
    steps = _train(_config(tmp_path, "+tether=troll_sampler", *mode), tmp_path)
    _assert_learnt(steps)
    for number, step in enumerate(steps):
        assert "training/rollout_probs_diff_max" not in step  # nothing was scored
        assert 0 < step["actor/troll/kl_mean"] < step["actor/troll/kl_max"]
        assert 0 <= step["actor/troll/projected"] < 0.5
        assert lag or step["actor/troll/lag_0/kl"] < 1e-4  # arithmetic alone: engine and trainer agree
        assert step["actor/troll/lag"] <= (lag if number else 0) + UPDATES - 1
