"""Vetted settings by name, and which of them a task and an algorithm take."""

from __future__ import annotations

from collections.abc import Callable

from tether.episodic import vetted
from tether.episodic.algorithms import find_algorithm
from tether.episodic.config import EpisodicConfig, taken_over
from tether.errors import ConfigError
from tether.names import look_up

DEFAULT_PRESET = "hopper-jump-quick"

PRESETS: dict[str, Callable[..., EpisodicConfig]] = {
    "metaworld-paper": vetted.metaworld,
    "metaworld-long": lambda *task: vetted.affordable(vetted.metaworld(*task)),
    "metaworld-quick": vetted.metaworld_quick,
    "box-pushing-dense-paper": vetted.box_dense,
    "box-pushing-dense-quick": vetted.box_dense_quick,
    "box-pushing-dense-long": lambda: vetted.affordable(vetted.box_dense()),
    "box-pushing-sparse-paper": vetted.box_sparse,
    "box-pushing-sparse-long": lambda: vetted.affordable(vetted.box_sparse()),
    "box-pushing-fixed-start-quick": vetted.box_fixed_start_quick,
    "hopper-jump-paper": vetted.hopper,
    "hopper-jump-quick": vetted.hopper_quick,
    "hopper-jump-sparse-paper": vetted.hopper_sparse,
    "hopper-jump-sparse-long": vetted.hopper_sparse_long,
    "hopper-jump-sparse-high": vetted.hopper_sparse_high,
    "table-tennis-paper": vetted.table_tennis,
    "table-tennis-long": lambda: vetted.affordable(vetted.table_tennis(), state_stride=10),
    "table-tennis-quick": vetted.table_tennis_quick,
    "table-tennis-refusing-quick": vetted.table_tennis_refusing_quick,
}
"""Name -> configuration: "paper" are published settings of TCE and "bbrl" the baseline's; "quick", "long",
"high" and "toperl" ones fit two cores; "fixed-start" and "refusing" ones are of older, easier tasks."""

VARIANT_OF: dict[str, str] = {}
"""Preset for another algorithm -> the preset of the same task and budget that it changes."""


def add_variant(name: str, of: str, change: Callable[..., EpisodicConfig]) -> None:
    """Make a preset known that changes another one for another algorithm."""
    PRESETS[name] = lambda *task: change(PRESETS[of](*task))
    VARIANT_OF[name] = of


add_variant("metaworld-bbrl", "metaworld-paper", vetted.metaworld_bbrl)
add_variant("metaworld-bbrl-long", "metaworld-long", vetted.metaworld_bbrl)
add_variant("metaworld-bbrl-quick", "metaworld-quick", vetted.metaworld_bbrl)
add_variant("metaworld-toperl", "metaworld-paper", vetted.metaworld_toperl)
add_variant("box-pushing-dense-bbrl", "box-pushing-dense-paper", vetted.box_bbrl)
add_variant("box-pushing-dense-bbrl-long", "box-pushing-dense-long", vetted.box_bbrl)
add_variant("box-pushing-sparse-bbrl-long", "box-pushing-sparse-long", vetted.box_bbrl)
add_variant("box-pushing-dense-bbrl-quick", "box-pushing-dense-quick", vetted.box_bbrl)
add_variant("box-pushing-fixed-start-bbrl-quick", "box-pushing-fixed-start-quick", vetted.box_bbrl)
add_variant("box-pushing-sparse-bbrl", "box-pushing-sparse-paper", vetted.box_bbrl)
add_variant("box-pushing-dense-toperl", "box-pushing-dense-long", vetted.box_toperl)
add_variant("hopper-jump-bbrl", "hopper-jump-paper", vetted.hopper_bbrl)
add_variant("hopper-jump-bbrl-quick", "hopper-jump-quick", vetted.hopper_bbrl)
add_variant("hopper-jump-sparse-bbrl", "hopper-jump-sparse-paper", vetted.hopper_bbrl)
add_variant("hopper-jump-sparse-toperl", "hopper-jump-sparse-long", vetted.hopper_toperl)
add_variant("hopper-jump-sparse-bbrl-long", "hopper-jump-sparse-long", vetted.hopper_bbrl)
add_variant("hopper-jump-sparse-bbrl-high", "hopper-jump-sparse-high", vetted.hopper_bbrl)
add_variant("table-tennis-bbrl", "table-tennis-paper", vetted.table_tennis_bbrl)
add_variant("table-tennis-bbrl-long", "table-tennis-long", vetted.table_tennis_bbrl)
add_variant("table-tennis-bbrl-quick", "table-tennis-quick", vetted.table_tennis_bbrl)
add_variant("table-tennis-refusing-bbrl-quick", "table-tennis-refusing-quick", vetted.table_tennis_bbrl)


def preset(name: str) -> EpisodicConfig:
    """The configuration of a name in `PRESETS`, or what your own function "package.module:function" returns.

    Meta-World presets take a task after a colon: "metaworld-paper:reach-v3".

    Raises:
        ConfigError: an unknown name; the message names the nearest known one.

    >>> preset("hopper-jump-paper").episodes
    64
    >>> preset("metaworld-paper:reach-v3").env_id
    'tether/MetaWorld-reach-v3'
    """
    base, colon, task = name.partition(":")
    if colon and (base in PRESETS or "-" in base):
        build = look_up(base, PRESETS, "preset")
        if not base.startswith("metaworld"):
            raise ConfigError(f"{base} has no tasks to choose from; got {name!r}.")
        config = build(task)
    else:
        config = look_up(name, PRESETS, "preset")()
    if not isinstance(config, EpisodicConfig):
        raise ConfigError(f"The preset {name!r} is {config!r}, which is no EpisodicConfig.")
    return config


def preset_for(name: str, algo: str) -> str | None:
    """The preset for another algorithm on the same task and budget, None where there is none.

    >>> preset_for("hopper-jump-quick", "bbrl"), preset_for("metaworld-bbrl:reach-v3", "tce")
    ('hopper-jump-bbrl-quick', 'metaworld-paper:reach-v3')
    """
    base, colon, task = name.partition(":")
    first = VARIANT_OF.get(base, base)
    family = [first, *(name for name, of in VARIANT_OF.items() if of == first)] if first in PRESETS else []
    return next((f"{name}{colon}{task}" for name in family if PRESETS[name]().algo == algo), None)


def choose(
    preset_name: str | None = None, env: str | None = None, algo: str | None = None
) -> tuple[str | None, EpisodicConfig]:
    """The preset and the settings meant by the name of a preset, an environment or an algorithm, or several.

    An environment alone takes its paper preset, or another of its own; without either it is the quick demo,
    `DEFAULT_PRESET`. An algorithm takes the preset's own variant for it. Where there is none, it takes the
    preset's environment, motion and budget (and all settings that the two algorithms share), and its own
    defaults for the rest.

    Raises:
        ConfigError: an unknown preset or algorithm, or an environment that is not the preset's.

    >>> choose("hopper-jump-quick", algo="bbrl")[0]
    'hopper-jump-bbrl-quick'
    >>> choose(env="tether/MetaWorld-reach-v3")[0]
    'metaworld-paper:reach-v3'
    """
    algorithm = find_algorithm(algo or EpisodicConfig.algo)
    if preset_name is None:
        preset_name = DEFAULT_PRESET if env is None else _preset_of(env)
    if preset_name is None:
        assert env is not None
        return None, algorithm.config_type(env, algo=algo or EpisodicConfig.algo)
    config = preset(preset_name)
    if algo is not None and config.algo != algo:
        if variant := preset_for(preset_name, algo):
            preset_name, config = variant, preset(variant)
        else:
            config = taken_over(config, algorithm.config_type, algo)
    if env is not None and config.env_id != env:
        raise ConfigError(
            f"The preset {preset_name!r} is for {config.env_id}, not for {env}. Give only one of the two."
        )
    return preset_name, config


def _preset_of(env: str) -> str | None:
    if env.startswith("tether/MetaWorld-"):
        return f"metaworld-paper:{env.removeprefix('tether/MetaWorld-')}"
    own = [name for name in PRESETS if preset(name).env_id == env]
    return next((name for name in own if name.endswith("-paper")), own[0] if own else None)
