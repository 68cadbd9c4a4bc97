"""Imported by Hydra in every program it starts: makes `+tether=troll` known. Loads nothing heavy."""

from tether.integrations.verl_switch import register

register()
