"""Reward components by name: importing this package registers every one of them."""

from evojax.rewards import correct, format, overlong, partial  # noqa: F401
