"""Ray, TransferQueue and the methods of verl's own trainer, unmodified, on two data-parallel workers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from actor import Rollouts, acting, jagged, make_actor
from tensordict import TensorDict

pytestmark = pytest.mark.slow

ray = pytest.importorskip("ray")

HERE = Path(__file__).parent
SETTINGS = """
+tether=troll
actor_rollout_ref.actor.policy_loss.troll_kl_bound=0.0005
actor_rollout_ref.actor.policy_loss.troll_top_k=8
+actor_rollout_ref.model.load_tokenizer=False
actor_rollout_ref.model.use_remove_padding=True
+actor_rollout_ref.model.override_config.attn_implementation=sdpa
actor_rollout_ref.model.enable_gradient_checkpointing=False
actor_rollout_ref.actor.strategy=fsdp2
actor_rollout_ref.actor.fsdp_config.use_torch_compile=False
actor_rollout_ref.actor.fsdp_config.model_dtype=fp32
+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32
actor_rollout_ref.actor.ppo_mini_batch_size=2
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2
actor_rollout_ref.actor.optim.lr=1e-2
actor_rollout_ref.actor.optim.weight_decay=0.0
actor_rollout_ref.actor.grad_clip=1e6
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2
actor_rollout_ref.rollout.n=2
actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.calculate_log_probs=False
transfer_queue.backend.SimpleStorage.num_data_storage_units=1
transfer_queue.backend.SimpleStorage.total_storage_size=1000
data.train_batch_size=4
trainer.device=cpu
trainer.n_gpus_per_node=2
algorithm.adv_estimator=grpo
"""

STORE = "actor_rollout_ref.actor.policy_loss.troll_old_store"


def _config(model: Path, store: str) -> Any:
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer", [f"actor_rollout_ref.model.path={model}", *SETTINGS.split(), f"{STORE}={store}"]
        )
    OmegaConf.set_struct(config, False)
    config.transfer_queue.enable = True
    return config


@pytest.fixture  # one for each test: verl seeds the names of its workers, so that two groups share them
def cluster() -> Iterator[None]:
    variables = {
        **{name: os.environ[name] for name in os.environ if name.startswith("VERL_")},
        "PYTHONPATH": str(HERE),
        "OMP_NUM_THREADS": "1",
        "TRANSFER_QUEUE_ENABLE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    os.environ["TRANSFER_QUEUE_ENABLE"] = "1"
    ray.init(
        num_cpus=6,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": variables},
        object_store_memory=200 * 2**20,
    )
    yield
    ray.shutdown()


def _workers(config: Any, name: str) -> Any:
    from cpu_worker import CPUActorWorker
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    pool = RayResourcePool(process_on_nodes=[2], use_gpu=False, name_prefix=name, max_colocate_count=1)
    actor = RayClassWithInitArgs(
        cls=ray.remote(CPUActorWorker), config=config.actor_rollout_ref, role="actor"
    )
    group = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=actor, device_name="cpu")
    group.init_model()
    return group


@pytest.mark.parametrize("store", ["local", "queue"])
def test_two_updates_on_two_workers(model: Path, cluster: None, store: str) -> None:
    """Exact support; what each worker recorded comes back to it, or all of it through TransferQueue."""
    import transfer_queue as queue
    from verl.trainer.ppo.v1 import PPOTrainerSync

    from tether.integrations.verl.carrier import FIELDS, HIDDEN, PLACE
    from tether.integrations.verl.store import HANDLE

    config, rollouts = _config(model, store), Rollouts.scripted(8)
    queue.init(config.transfer_queue)
    workers = _workers(config, store)
    keys = [f"prompt{i // 2}_{i % 2}_0" for i in range(8)]
    scores = [torch.zeros(len(response)) for response in rollouts.responses]
    for i, score in enumerate(scores):
        score[-1] = float(i % 2)
    fields = TensorDict(
        {
            **{n: v for n, v in rollouts.batch().items() if isinstance(v, torch.Tensor)},
            "rm_scores": jagged(scores),
            "uid": torch.arange(8) // 2,
        },
        batch_size=8,
    )
    lengths = [len(p) + len(r) for p, r in zip(rollouts.prompts, rollouts.responses, strict=True)]
    batch = queue.kv_batch_put(
        keys=keys, partition_id="train", fields=fields, tags=[{"seq_len": length} for length in lengths]
    )
    trainer = SimpleNamespace(
        config=config,
        actor_rollout_wg=workers,
        use_critic=False,
        kl_ctrl_in_reward=None,
        distillation_config=None,
        global_steps=1,
    )
    metrics: dict[str, Any] = {}
    for method in ("_compute_old_log_prob", "_compute_advantage", "_update_actor"):
        batch.extra_info |= {"temperature": 1.0, "global_token_num": lengths}
        batch = getattr(PPOTrainerSync, method)(trainer, batch, metrics)

    # What travelled is what one process records of the same rollouts.
    travelled = [HANDLE] if store == "local" else [HANDLE, *FIELDS, HIDDEN, PLACE]
    stored = queue.kv_batch_get(keys=keys, partition_id="train", select_fields=[*travelled, "advantages"])
    settings = acting(troll_kl_bound=0.0005, troll_top_k=8, troll_old_store=store)
    alone = make_actor(model, settings, learning_rate=1e-2)
    expected = rollouts.score(alone)
    assert {name for name in expected if name.startswith("troll_")} == set(travelled)
    assert [int(row[1]) for row in stored[HANDLE].unbind()] == [0, 0, 0, 0, 1, 1, 1, 1]
    for name in travelled[1:]:
        for found, own in zip(stored[name].unbind(), expected[name].unbind(), strict=True):
            torch.testing.assert_close(found, own, atol=1e-5, rtol=0)

    # A round trip changes no bit, of bfloat16 neither.
    if store == "queue":
        mine = TensorDict({name: expected[name] for name in travelled}, batch_size=8)
        mine[HIDDEN] = mine[HIDDEN].bfloat16()
        queue.kv_batch_put(keys=keys, partition_id="again", fields=mine, tags=[{} for _ in keys])
        again = queue.kv_batch_get(keys=keys, partition_id="again", select_fields=travelled)
        for name in travelled:
            for found, own in zip(again[name].unbind(), mine[name].unbind(), strict=True):
                assert found.dtype == own.dtype
                assert torch.equal(found, own)

    # Each worker has half of the batch and takes a mini-batch of two sequences from it, twice.
    rollouts.advantages = [row.clone() for row in stored["advantages"].unbind()]
    own_metrics = []
    for rows in ([0, 1, 4, 5], [2, 3, 6, 7]):
        part = Rollouts(
            *([values[i] for i in rows] for values in (
                rollouts.prompts, rollouts.responses, rollouts.masks, rollouts.advantages,
            ))
        )  # fmt: skip
        fresh = {name: jagged([expected[name].unbind()[i] for i in rows]) for name in expected}
        fresh["advantages"] = jagged(part.advantages)
        own_metrics.append(part.update(alone, fresh))
    for name in ("kl_mean", "projected", "regression"):
        mean = sum(part[f"actor/troll/{name}"] for part in own_metrics) / 2
        assert metrics[f"actor/troll/{name}"] == pytest.approx(mean, rel=1e-3, abs=1e-6)
    largest = max(part["actor/troll/kl_max"] for part in own_metrics)
    assert metrics["actor/troll/kl_max"] == pytest.approx(largest, rel=1e-3)
    assert own_metrics[0]["actor/troll/kl_max"] < 1e-5  # the first update starts at the old policy
    assert own_metrics[1]["actor/troll/projected"] > 0
    queue.close()
