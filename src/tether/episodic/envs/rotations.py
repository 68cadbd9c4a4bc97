"""Quaternions [w, x, y, z] as far as the environments need them."""

from __future__ import annotations

import math

import numpy as np

from tether.episodic.episodes import FloatArray


def rotation_distance(first: FloatArray, second: FloatArray) -> float:
    """The angle in radians that turns one orientation into the other, in [0, pi].

    >>> quarter = np.array([math.sqrt(0.5), 0.0, 0.0, math.sqrt(0.5)])
    >>> round(rotation_distance(np.array([1.0, 0.0, 0.0, 0.0]), quarter) / math.pi, 6)
    0.5
    """
    return 2.0 * math.acos(min(1.0, abs(float(first @ second))))


def rotation_error(current: FloatArray, desired: FloatArray) -> FloatArray:
    """The vector part of the rotation from one orientation to another, [3], for a feedback law.

    Source: Siciliano et al., Robotics, equation 3.91.
    """
    (w, a, b, c), (v, x, y, z) = current.tolist(), desired.tolist()
    return np.array(
        [
            w * x - v * a - (y * c - z * b),
            w * y - v * b - (z * a - x * c),
            w * z - v * c - (x * b - y * a),
        ]
    )
