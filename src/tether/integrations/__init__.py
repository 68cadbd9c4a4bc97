"""Plug-ins that bring the trust region into other people's trainers, without forking them."""
