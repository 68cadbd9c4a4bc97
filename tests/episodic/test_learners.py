"""TCE and BBRL: what one update does, and that both learn a task small enough for a test."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tether.episodic.algorithms import build_learner, config_from_dict
from tether.episodic.config import EpisodicConfig, OnPolicyConfig, TrustRegionConfig, UpdateConfig
from tether.episodic.critic import Critic, CriticConfig
from tether.episodic.evaluate import evaluate_learner
from tether.episodic.on_policy import OnPolicyLearner, SampledMotions
from tether.episodic.policy import Covariance, PolicyConfig
from tether.episodic.presets import PRESETS, preset
from tether.episodic.prodmp import ProDMPConfig
from tether.episodic.sampler import Episodes, EpisodeSampler
from tether.episodic.segments import gae_returns
from tether.errors import CheckpointError, ConfigError, InvalidInputError
from tether.experiments.files import dump_json, load_json

ENV = "tether/PointReach-v0"


def small_config(algo: str = "tce", **changes: Any) -> OnPolicyConfig:
    """Seconds on one core."""
    config = OnPolicyConfig(
        env_id=ENV,
        algo=algo,
        iterations=40,
        episodes=32,
        num_workers=0,
        precision="float64",
        motion=ProDMPConfig(2, 0.5, 15.0, 3.0, weights_scale=0.3, relative_goal=True),
        policy=PolicyConfig((32,), "tanh", init_std=0.5),
        critic=CriticConfig((32,), "tanh", learning_rate=3e-3, epochs=20),
        trust_region=TrustRegionConfig(0.1, 0.02),
        update=UpdateConfig(learning_rate=3e-3, epochs=10, segment_points=10),
    )
    return replace(config, **changes)


@pytest.fixture
def sampler() -> Iterator[EpisodeSampler]:
    with EpisodeSampler(ENV, num_workers=0, seed=0) as sampler:
        yield sampler


def build(config: OnPolicyConfig, sampler: EpisodeSampler) -> OnPolicyLearner:
    learner = build_learner(config, sampler.spec)
    assert isinstance(learner, OnPolicyLearner)
    return learner


def tried(learner: OnPolicyLearner, sampler: EpisodeSampler) -> tuple[SampledMotions, Episodes]:
    motions = learner.act(sampler.reset(learner.config.episodes))
    return motions, sampler.execute(motions.positions, motions.velocities)


def learn(
    learner: OnPolicyLearner, motions: SampledMotions, episodes: Episodes, progress: float
) -> dict[str, float]:
    learner.observe(motions, episodes)
    return learner.update(progress)


@pytest.mark.parametrize(("algo", "points"), [("bbrl", 10), ("tce", 2)])
def test_a_single_advantage_an_iteration_is_refused(algo: str, points: int) -> None:
    """Normalised it is 0, so the run would go through and learn nothing."""
    with pytest.raises(ConfigError, match=f"{algo} normalises .* episodes=1 .* Set episodes to 2"):
        small_config(algo, episodes=1, update=UpdateConfig(segment_points=points))
    small_config(algo, episodes=2, update=UpdateConfig(segment_points=points))
    small_config("tce", episodes=1)


@pytest.mark.parametrize("algo", ["tce", "bbrl"])
def test_learns_to_reach_a_point(algo: str, sampler: EpisodeSampler) -> None:
    """The untrained robot stays at the centre, half a unit from the goal at each of 50 steps."""
    config = small_config(algo, iterations=60 if algo == "tce" else 100)
    learner = build(config, sampler)
    before = evaluate_learner(learner, sampler, 32).returns.mean()
    for iteration in range(config.iterations):
        learn(learner, *tried(learner, sampler), iteration / config.iterations)
    after = evaluate_learner(learner, sampler, 32).returns.mean()
    assert -45 < before < -30
    assert after > -22


@pytest.mark.parametrize("algo", ["tce", "bbrl"])
def test_a_contextual_covariance_learns_the_task_and_settles_differently_by_context(
    algo: str, sampler: EpisodeSampler
) -> None:
    policy = PolicyConfig((32,), "tanh", contextual_covariance=True, init_std=0.5)
    learner = build(small_config(algo, policy=policy), sampler)
    initial = learner.initial_entropy
    for iteration in range(20):
        learn(learner, *tried(learner, sampler), iteration / 40)
    entropies = learner.policy(learner.act(sampler.reset(32)).inputs).entropy()
    assert evaluate_learner(learner, sampler, 32).returns.mean() > -20  # from -37: half a unit away
    assert entropies.max() < initial - 1.0
    assert entropies.std() > 0.05


@pytest.mark.parametrize("algo", ["tce", "bbrl"])
def test_a_motion_that_earned_more_becomes_more_likely(algo: str, sampler: EpisodeSampler) -> None:
    learner = build(small_config(algo), sampler)
    motions, episodes = tried(learner, sampler)
    rewards = np.zeros_like(episodes.rewards)
    rewards[0] = 1.0  # one episode is better than the rest, all along
    learn(learner, motions, replace(episodes, rewards=rewards), 0.0)
    after = learner.policy(motions.inputs).log_prob(motions.weights) - motions.distribution.log_prob(
        motions.weights
    )
    assert after[0] > 0.5
    assert after[1:].mean() < 0


@pytest.mark.parametrize("algo", ["tce", "bbrl"])
@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_contextual_covariances_learn_too(algo: str, covariance: Covariance, sampler: EpisodeSampler) -> None:
    policy = PolicyConfig((32,), "tanh", covariance=covariance, contextual_covariance=True)
    learner = build(small_config(algo, policy=policy), sampler)
    motions, episodes = tried(learner, sampler)
    rewards = np.zeros_like(episodes.rewards)
    rewards[0] = 1.0
    learn(learner, motions, replace(episodes, rewards=rewards), 0.0)
    after = learner.policy(motions.inputs)
    gain = after.log_prob(motions.weights) - motions.distribution.log_prob(motions.weights)
    assert gain[0] > 0.5
    assert gain[1:].mean() < 0
    assert after.scale.std(0).max() > 0  # each context has its own by now


def test_the_first_gradient_is_the_policy_gradient_of_the_segments(sampler: EpisodeSampler) -> None:
    """With an untouched network the projection is the identity and every ratio 1, so one step of plain
    gradient descent follows mean(A grad log p(segment)); here p comes from torch.distributions."""
    config = small_config(trust_region=TrustRegionConfig(0.1, 0.02, regression_weight=0.0))
    config = replace(
        config, update=replace(config.update, epochs=1), critic=replace(config.critic, time_input=False)
    )
    learner = build(config, sampler)
    learner.policy_optimizer = torch.optim.SGD(learner.policy.parameters(), lr=1.0)  # type: ignore[assignment]
    motions, episodes = tried(learner, sampler)
    before = [parameter.detach().clone() for parameter in learner.policy.parameters()]
    draws = learner.generator.get_state()
    points = learner._draw_points()  # type: ignore[attr-defined]
    learner.generator.set_state(draws)
    with torch.no_grad():
        learner.critic.observe(torch.as_tensor(episodes.observations[:, :-1]))
        values = learner.critic(torch.as_tensor(episodes.observations[:, :-1]))
        learner.critic.statistics = type(learner.critic.statistics)(sampler.spec.observation_size)
    rewards = torch.as_tensor(episodes.rewards)
    advantages = torch.stack(
        [
            rewards[:, a:b].sum(1) + values[:, b] - values[:, a]
            for a, b in zip(points[:-1].tolist(), points[1:].tolist(), strict=True)
        ],
        dim=1,
    )
    advantages = (advantages - advantages.mean()) / advantages.std()
    distribution = learner.policy(motions.inputs)
    basis = learner.basis.positions
    pairs = [basis[[a, b]] for a, b in zip(points[:-1].tolist(), points[1:].tolist(), strict=True)]
    matrices = [torch.kron(pair, torch.eye(2, dtype=pair.dtype)) for pair in pairs]  # positions by end, joint
    order = torch.arange(learner.motion.num_weights).reshape(2, -1).mT.flatten()  # weights by basis, joint
    covariance = distribution.scale @ distribution.scale.mT
    covariances = [matrix @ covariance[order][:, order] @ matrix.mT for matrix in matrices]
    ridge = 1e-4 * max(c.diagonal().max().item() for c in covariances)
    objective = torch.zeros((), dtype=torch.float64)
    for s, (matrix, cov) in enumerate(zip(matrices, covariances, strict=True)):
        normal = torch.distributions.MultivariateNormal(
            distribution.mean[:, order] @ matrix.mT, cov + ridge * torch.eye(4, dtype=torch.float64)
        )
        objective = (
            objective + (advantages[:, s] * normal.log_prob(motions.weights[:, order] @ matrix.mT)).sum()
        )
    expected = torch.autograd.grad(objective / advantages.numel(), list(learner.policy.parameters()))
    learn(learner, motions, episodes, 0.0)
    moves = [new - old for new, old in zip(learner.policy.parameters(), before, strict=True)]
    factor = config.update.learning_rate  # update() sets the optimiser's learning rate
    for move, gradient in zip(moves, expected, strict=True):
        assert torch.allclose(move / factor, gradient, atol=1e-8)


def test_the_last_reward_moves_the_policy_only_if_asked(sampler: EpisodeSampler) -> None:
    def policy_after(last_reward: float, include: bool) -> torch.Tensor:
        config = small_config()
        config = replace(config, update=replace(config.update, include_last_reward=include))
        learner = build(config, sampler)
        sampler.set_random_state({"seed": 0, "episodes_drawn": 0})
        motions, episodes = tried(learner, sampler)
        episodes.rewards[::2, -1] += last_reward
        learn(learner, motions, episodes, 0.0)
        return torch.nn.utils.parameters_to_vector(learner.policy.parameters()).detach()

    assert torch.equal(policy_after(0.0, include=False), policy_after(9.0, include=False))
    assert not torch.equal(policy_after(0.0, include=True), policy_after(9.0, include=True))


def test_the_critic_is_told_the_seconds_passed(
    sampler: EpisodeSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = build(small_config(episodes=3), sampler)
    motions, episodes = tried(learner, sampler)
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(learner.critic, "observe", seen.append)
    learn(learner, motions, episodes, 0.0)
    assert np.array_equal(seen[0][..., :-1].numpy(), episodes.observations[:, :-1])
    for row in seen[0][..., -1].tolist():
        assert row == pytest.approx([0.02 * t for t in range(50)])


def test_rewards_from_the_event_on_count_at_the_event(sampler: EpisodeSampler) -> None:
    """Learning from them is learning from rewards that came there in the first place."""

    def policy_after(shift: bool, summed: bool) -> torch.Tensor:
        config = small_config()
        config = replace(config, update=replace(config.update, shift_rewards=shift))
        learner = build(config, sampler)
        sampler.set_random_state({"seed": 0, "episodes_drawn": 0})
        motions, episodes = tried(learner, sampler)
        episodes.event_steps[::2] = 20
        for row in episodes.rewards[::2] if summed else ():
            row[20], row[21:] = row[20:].sum(), 0.0
        learn(learner, motions, episodes, 0.0)
        return torch.nn.utils.parameters_to_vector(learner.policy.parameters()).detach()

    shifted = policy_after(shift=True, summed=False)
    assert torch.allclose(shifted, policy_after(shift=False, summed=True), rtol=0, atol=1e-10)
    assert not torch.allclose(shifted, policy_after(shift=False, summed=False), rtol=0, atol=1e-5)


def test_the_network_follows_its_projection(sampler: EpisodeSampler) -> None:
    """With nothing to gain, the regression alone pulls a network outside the region towards its border."""
    config = small_config(update=UpdateConfig(learning_rate=1e-2, epochs=200, segment_points=10))
    learner = build(config, sampler)
    motions, episodes = tried(learner, sampler)
    with torch.no_grad():
        learner.policy.network[-1].bias += 3.0  # type: ignore[operator, union-attr]
    before = learner.policy(motions.inputs).kl(motions.distribution)[0]
    # Episodes that are all alike have no advantages.
    same = replace(
        episodes,
        rewards=np.ones_like(episodes.rewards),
        observations=np.repeat(episodes.observations[:1], config.episodes, axis=0),
    )
    learn(learner, motions, same, 0.0)
    after = learner.policy(motions.inputs).kl(motions.distribution)[0]
    assert (before > 1.0).all()
    assert after.mean() < 0.2


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_bbrl_leaves_a_covariance_within_the_bound(covariance: str, sampler: EpisodeSampler) -> None:
    config = small_config(
        "bbrl",
        policy=PolicyConfig((32,), covariance=covariance),  # type: ignore[arg-type]
        trust_region=TrustRegionConfig(0.1, 1e-4),
        update=UpdateConfig(learning_rate=3e-2, epochs=20),
    )
    learner = build(config, sampler)
    motions, episodes = tried(learner, sampler)
    metrics = learn(learner, motions, episodes, 0.0)
    after = learner.policy(motions.inputs).kl(motions.distribution)[1].item()
    assert metrics["kl_cov_part"] > 1e-4
    assert metrics["projected_cov"] == 1.0
    assert after == pytest.approx(1e-4, rel=1e-6)


@pytest.mark.parametrize(("algo", "pulled", "contextual"), [
    ("bbrl", False, False), ("bbrl", True, False), ("bbrl", False, True), ("tce", False, False),
])  # fmt: skip
def test_a_covariance_is_pulled_unless_it_is_set(
    algo: str, pulled: bool, contextual: bool, sampler: EpisodeSampler
) -> None:
    """Network and projection differ in mean and covariance; where nothing is gained, only the pull acts."""
    config = small_config(
        algo,
        policy=PolicyConfig((32,), "tanh", init_std=0.5, contextual_covariance=contextual),
        trust_region=TrustRegionConfig(0.1, 1e-4, pull_covariance=pulled),
    )
    learner = build(config, sampler)
    motions, _ = tried(learner, sampler)
    with torch.no_grad():
        learner.policy.network[-1].bias += 3.0  # type: ignore[operator, union-attr]
        if not contextual:
            learner.policy.scale_parameters -= 0.5
    before = learner.policy(motions.inputs)
    learner._improve_policy(motions, 0.0, lambda projected: 0.0 * projected.mean.sum())
    after = learner.policy(motions.inputs)
    assert not torch.equal(after.mean, before.mean)
    assert torch.equal(after.scale, before.scale) is ((algo, pulled, contextual) == ("bbrl", False, False))


def test_runs_older_than_a_setting_keep_what_they_were_trained_with() -> None:
    values = preset("hopper-jump-sparse-bbrl").as_dict()
    del values["trust_region"]["pull_covariance"]
    assert config_from_dict(values) == preset("hopper-jump-sparse-bbrl")
    values = preset("metaworld-bbrl").as_dict()
    del values["trust_region"]["pull_covariance"]
    older, now = config_from_dict(values), preset("metaworld-bbrl")
    assert older.trust_region.pull_covariance  # type: ignore[attr-defined]
    assert not now.trust_region.pull_covariance  # type: ignore[attr-defined]


def test_entropy_does_not_fall_below_its_scheduled_bound(sampler: EpisodeSampler) -> None:
    """A bound that does not move yet keeps BBRL's covariance at the initial entropy or above."""
    config = small_config(
        "bbrl",
        trust_region=TrustRegionConfig(0.1, 0.5, target_entropy=-10.0),
        update=UpdateConfig(learning_rate=3e-2, epochs=20),
    )
    for progress, held in ((0.0, True), (1.0, False)):
        learner = build(config, sampler)
        motions, episodes = tried(learner, sampler)
        with torch.no_grad():
            learner.policy.scale_parameters -= 0.5
        learn(learner, motions, episodes, progress)
        entropy = learner.policy(motions.inputs).entropy().item()
        assert (entropy >= learner.initial_entropy - 1e-9) is held


def test_learning_rates_follow_the_line_to_their_last_fraction(sampler: EpisodeSampler) -> None:
    learner = build(small_config(), sampler)
    motions, episodes = tried(learner, sampler)
    for progress, factor in ((0.0, 1.0), (0.5, 0.505), (1.0, 0.01)):
        metrics = learn(learner, motions, episodes, progress)
        assert metrics["learning_rate"] == pytest.approx(3e-3 * factor)
        assert learner.critic_optimizer.param_groups[0]["lr"] == pytest.approx(3e-3 * factor)


def test_a_deterministic_plan_is_the_mean_and_starts_where_the_robot_is(sampler: EpisodeSampler) -> None:
    learner = build(small_config(), sampler)
    starts = sampler.reset(3)
    first, second = (learner.act(starts, explore=False) for _ in range(2))
    assert torch.equal(first.weights, learner.policy(first.inputs).mean)
    assert np.array_equal(first.positions, second.positions)
    assert np.abs(first.positions[:, 0] - starts.positions).max() < 0.01
    assert not np.allclose(learner.act(starts).positions, first.positions)


def test_the_policy_sees_what_it_is_configured_to_see(sampler: EpisodeSampler) -> None:
    starts = sampler.reset(2)
    for name, seen in (("observation", starts.observations), ("context", starts.contexts)):
        learner = build(small_config(policy_input=name), sampler)
        assert np.array_equal(learner.act(starts).inputs.numpy(), seen)


def test_critic_fits_a_function_and_normalised_targets_reach_a_large_offset() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(256, 2, generator=generator)
    targets = 3000 + 100 * inputs[:, 0] * inputs[:, 1]
    errors = []
    for normalise in (False, True):
        config = CriticConfig((32,), "tanh", learning_rate=1e-2, epochs=300, normalise_targets=normalise)
        critic = Critic(config, 2, generator=torch.Generator().manual_seed(0))
        critic.observe(inputs)
        lesson = critic.prepared(inputs, targets)
        before = critic.loss(*lesson).item()
        critic.fit(torch.optim.Adam(critic.network.parameters(), lr=1e-2), *lesson)
        assert critic.loss(*lesson).item() < before
        with torch.no_grad():
            errors.append((critic(inputs) - targets).square().mean().sqrt().item())
    assert errors[1] < 15
    assert errors[0] > 1000  # the reason for the option: 300 steps of Adam cannot reach 3000
    with pytest.raises(InvalidInputError, match="targets hold NaN"):
        critic.prepared(inputs, targets * torch.nan)


@pytest.mark.parametrize("algo", ["tce", "bbrl"])
def test_the_critic_learns_on_while_the_next_motions_are_chosen_and_who_asks_for_it_waits(
    algo: str, sampler: EpisodeSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fit that is kept waiting ends in the same state as one that is not."""
    at_once, late = (build(small_config(algo), sampler) for _ in range(2))
    beginning = sampler.random_state()
    batches = [tried(at_once, sampler)]
    learn(at_once, *batches[0], 0.0)
    batches.append(tried(at_once, sampler))
    metrics = learn(at_once, *batches[1], 0.5)

    sampler.set_random_state(beginning)
    tried(late, sampler)
    may, fit = threading.Event(), Critic.fit

    def held(critic: Critic, *lesson: Any) -> None:
        assert may.wait(60)
        fit(critic, *lesson)

    monkeypatch.setattr(Critic, "fit", held)
    learn(late, *batches[0], 0.0)
    motions, _ = tried(late, sampler)  # while the fit waits
    assert torch.equal(motions.weights, batches[1][0].weights)
    threading.Timer(0.2, may.set).start()
    held_back = learn(late, *batches[1], 0.5)
    assert held_back["critic_error"] == metrics["critic_error"]
    states = (late.state(), at_once.state())
    for name in ("critic", "critic_optimizer"):
        torch.testing.assert_close(*(state[name] for state in states), rtol=0, atol=0)


def test_a_fit_that_fails_is_not_lost(sampler: EpisodeSampler, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no room")

    learner = build(small_config(), sampler)
    batch = tried(learner, sampler)
    monkeypatch.setattr(Critic, "fit", fail)
    learn(learner, *batch, 0.0)
    for go_on in (learner.state, lambda: learn(learner, *batch, 0.5)):
        with pytest.raises(MemoryError, match="no room"):
            go_on()


@pytest.mark.parametrize("algo", ["tce", "bbrl"])
def test_rewards_that_are_not_finite_are_named_at_once(algo: str, sampler: EpisodeSampler) -> None:
    learner = build(small_config(algo), sampler)
    motions, episodes = tried(learner, sampler)
    with pytest.raises(InvalidInputError, match="targets hold NaN or infinity"):
        learn(learner, motions, replace(episodes, rewards=episodes.rewards * np.nan), 0.0)


def test_a_stride_fits_the_critic_on_every_nth_state_of_all_episodes_and_in_turn_on_all(
    sampler: EpisodeSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first state is drawn anew each iteration; inputs and targets stay together."""
    config = small_config(episodes=3)
    config = replace(config, update=replace(config.update, epochs=1))
    critic = replace(config.critic, state_stride=7, time_input=False)
    learner = build(replace(config, critic=critic), sampler)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    prepared = learner.critic.prepared

    def note(inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append((inputs, targets))
        return prepared(inputs, targets)

    monkeypatch.setattr(learner.critic, "prepared", note)
    monkeypatch.setattr(learner.critic, "fit", lambda *_: None)
    motions, episodes = tried(learner, sampler)
    firsts = set()
    for _ in range(40):
        learn(learner, motions, episodes, 0.0)
        inputs, targets = seen.pop()
        states = inputs.reshape(3, -1, sampler.spec.observation_size).numpy()
        first = next(t for t in range(7) if np.array_equal(states, episodes.observations[:, t:50:7]))
        with torch.no_grad():
            values = learner.critic(torch.as_tensor(episodes.observations[:, :-1]))
        wanted = gae_returns(torch.as_tensor(episodes.rewards), values)[:, first::7]
        assert torch.allclose(targets.reshape(wanted.shape), wanted)
        firsts.add(first)
    assert firsts == set(range(7))
    with pytest.raises(ConfigError, match=r"state_stride must be at most 50.*got 51"):
        build(replace(config, critic=replace(config.critic, state_stride=51)), sampler)
    with pytest.raises(ConfigError, match="state_stride is 1"):
        CriticConfig(state_stride=0)


def test_state_of_another_environment_algorithm_or_size_is_refused(sampler: EpisodeSampler) -> None:
    learner = build(small_config(), sampler)
    state = learner.state()
    learner.load_state(state)
    with pytest.raises(CheckpointError, match="checkpoint is of algo 'bbrl', but this is 'tce'"):
        learner.load_state(build(small_config("bbrl"), sampler).state())
    with pytest.raises(CheckpointError, match="checkpoint is of env_id 'other'"):
        learner.load_state(state | {"env_id": "other"})
    wider = build(small_config(policy=PolicyConfig((64,))), sampler)
    with pytest.raises(CheckpointError, match="'policy' does not fit this run"):
        learner.load_state(wider.state())
    with pytest.raises(CheckpointError, match="env_id None, but this is 'tether/PointReach-v0'"):
        learner.load_state({"weights": 1})


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_survive_json(name: str) -> None:
    config = preset(name)
    assert config_from_dict(load_json(dump_json(config.as_dict()))) == config


def test_presets_hold_the_papers_table() -> None:
    """Spot checks of the published appendix, one row a task."""
    metaworld, box, hopper = (
        preset(f"{name}-paper") for name in ("metaworld", "box-pushing-dense", "hopper-jump")
    )
    tennis = preset("table-tennis-paper")
    table = [
        (
            c.motion.num_basis, c.motion.tau, c.motion.alpha, c.episodes, c.iterations,
            c.trust_region.mean_bound, c.trust_region.cov_bound, c.update.learning_rate, c.precision,
        )
        for c in (metaworld, box, hopper, tennis)
    ]  # fmt: skip
    assert table == [
        (8, 5.0, 10.0, 16, 7600, 0.005, 0.0005, 3e-4, "float32"),
        (8, 2.0, 10.0, 152, 7500, 0.05, 0.0005, 3e-4, "float64"),
        (3, 0.8, 10.0, 64, 3000, 0.1, 0.02, 1e-4, "float64"),
        (3, 0.75, 25.0, 76, 12000, 0.005, 0.00025, 3e-4, "float32"),
    ]


def test_impossible_settings_are_refused(sampler: EpisodeSampler) -> None:
    with pytest.raises(ConfigError, match=r"Unknown preset 'hopper'\..* Known: .*hopper-jump-quick"):
        preset("hopper")
    with pytest.raises(ConfigError, match="has no tasks"):
        preset("hopper-jump-quick:reach-v3")
    with pytest.raises(ConfigError, match=r"Unknown algorithm 'ppo'\. Known: bbrl, tce"):
        build_learner(EpisodicConfig(ENV, algo="ppo"), sampler.spec)
    with pytest.raises(ConfigError, match="episodes must be at least 1, got 0"):
        EpisodicConfig(ENV, episodes=0)
    with pytest.raises(ConfigError, match="num_workers"):
        EpisodicConfig(ENV, num_workers=-1)
    with pytest.raises(ConfigError, match=r"mean_bound and cov_bound must be positive.*-1"):
        TrustRegionConfig(mean_bound=-1)
    for weight in (-1.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match=rf"regression_weight finite and not negative.* {weight}\."):
            TrustRegionConfig(regression_weight=weight)
    with pytest.raises(ConfigError, match=r"final_learning_rate_fraction must lie in \(0, 1\]"):
        UpdateConfig(final_learning_rate_fraction=0.0)
    for late in (-0.1, 1.0, math.nan):
        with pytest.raises(ConfigError, match=rf"learning_rates_fall_from must lie in \[0, 1\), got {late}"):
            UpdateConfig(learning_rates_fall_from=late)
    with pytest.raises(ConfigError, match="cut at 2 points or more, got segment_points=0"):
        UpdateConfig(segment_points=0)
    for rates in ({"learning_rate": math.inf}, {"weight_decay": math.nan}, {"learning_rate": math.nan}):
        with pytest.raises(ConfigError, match="learning_rate > 0"):
            UpdateConfig(**rates)
        with pytest.raises(ConfigError, match="learning_rate > 0"):
            CriticConfig(**rates)
    with pytest.raises(ConfigError, match="target_entropy is a number of nats or None, got nan"):
        TrustRegionConfig(target_entropy=math.nan)
    with pytest.raises(ConfigError, match=r"Unknown setting motion\.taus"):
        config_from_dict({"env_id": ENV, "motion": {"taus": 1.0}})
    with pytest.raises(ConfigError, match=r"Settings are missing.*env_id"):
        config_from_dict({"seed": 1})


def test_a_bound_on_the_entropy_that_would_rise_is_refused(sampler: EpisodeSampler) -> None:
    at_first = 0.5 * math.log(2 * math.pi * math.e) + math.log(0.5)  # of a weight with its init_std
    for target in (at_first, at_first - 1.0):
        for precision in ("float32", "float64"):
            region = TrustRegionConfig(target_entropy=target)
            build(small_config(trust_region=region, precision=precision), sampler)
    with pytest.raises(ConfigError, match=r"target_entropy is 57\.5 nats a weight.*begins with 0\.726"):
        build(small_config(trust_region=TrustRegionConfig(target_entropy=57.5)), sampler)


def test_more_cuts_than_steps_are_refused(sampler: EpisodeSampler) -> None:
    with pytest.raises(ConfigError, match="50 steps is cut at 2 to 50 points"):
        build(small_config(update=UpdateConfig(segment_points=51)), sampler)


def test_a_delay_that_lets_no_cut_move_is_refused(sampler: EpisodeSampler) -> None:
    """25 points of 50 steps of 0.02 s: the last is at 0.98 s or a step later."""
    config = small_config(update=UpdateConfig(segment_points=25))
    with pytest.raises(ConfigError, match=r"motion\.delay=0\.98 lets nothing move before 0\.98 s"):
        build(replace(config, motion=replace(config.motion, delay=0.98)), sampler)
    learner = build(replace(config, motion=replace(config.motion, delay=0.97)), sampler)
    motions, episodes = tried(learner, sampler)
    assert np.isfinite(learn(learner, motions, episodes, 0.0)["policy_loss"])
