"""Proposers by registered name; importing this package registers all of them."""

from evojax.evolution.proposers import playbook as playbook
from evojax.evolution.proposers import random as random
from evojax.evolution.proposers.base import PROPOSERS as PROPOSERS
