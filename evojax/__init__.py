"""evojax: reinforcement learning for language models that improves the way it trains."""

__version__ = "0.1.0"
