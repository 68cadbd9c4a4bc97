"""Where `InsideTrainer` was: what it did is a keyword of every TRL trainer, or was measured not to help."""

from __future__ import annotations

from tether.errors import replaced

__getattr__ = replaced(
    __name__,
    InsideTrainer="the keyword kl_stop of every trainer (tether.integrations.trl_kl_stop)",
    InsideOptions="the keyword kl_stop of every trainer (tether.integrations.trl_kl_stop)",
)
