"""TROLL on verl: a plug-in for the released trainer, without a fork.

Add two words to a `python -m verl.trainer.main_ppo` command::

    +tether=troll actor_rollout_ref.actor.strategy=fsdp2

The first stands for these lines and the defaults of the other settings; the second, because verl's default,
FSDP1, goes with ``troll_support=bucket`` alone::

    actor_rollout_ref.model.external_lib=tether.integrations.verl
    +actor_rollout_ref.model.model_type=troll
    actor_rollout_ref.actor.policy_loss._target_=tether.integrations.verl.TROLLPolicyLossConfig
    actor_rollout_ref.actor.policy_loss.loss_mode=troll
    +actor_rollout_ref.actor.policy_loss.troll_kl_bound=0.05

What happens in a step: when verl scores fresh rollouts with the policy that made them, the engine keeps each
response token's most likely ids beside its log-probability; they travel with the batch through TransferQueue.
In every update the engine hands the new logits to the projection, and verl's own loss function does the rest:
estimators, aggregation, rollout weights, entropy bonus and reference penalty are verl's.
With `+tether=troll_sampler` the old policy is instead what the engine reported while it sampled, and nothing
is scored. See docs/verl.md and recipes/verl.

Importing this package raises `MissingDependencyError` where verl is missing, another version, or beside a TRL
it cannot live with.
"""

# First, because it says what to install where verl is missing or cannot work.
import tether.integrations.verl.environment  # noqa: F401

# isort: split
from tether.integrations.verl.engines import TROLLFSDPEngine
from tether.integrations.verl.losses import troll_policy_loss
from tether.integrations.verl.settings import LOSS_MODE, MODEL_TYPE, TROLLPolicyLossConfig

# isort: split
import verl.workers.engine

from tether.integrations.verl import vllm_reports

vllm_reports.register()
if verl.workers.engine.MegatronEngine is not None:  # verl's way of saying that Megatron is not installed
    from tether.integrations.verl import megatron  # noqa: F401

__all__ = ["LOSS_MODE", "MODEL_TYPE", "TROLLFSDPEngine", "TROLLPolicyLossConfig", "troll_policy_loss"]
