"""Domains by name: importing this package registers every one of them."""

from evojax.domains.math import domain as _math  # noqa: F401
