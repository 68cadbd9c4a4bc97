"""Imported before TRL's asynchronous trainer: says what the installed TRL lacks of it."""

from tether.integrations.trl_seam import check_async

check_async()
