"""A preset small enough to train in a test: "queue_presets:point"."""

from __future__ import annotations

from tether.episodic.config import OnPolicyConfig


def point() -> OnPolicyConfig:
    """A point that reaches a goal."""
    return OnPolicyConfig("tether/PointReach-v0", iterations=5, num_workers=0)
