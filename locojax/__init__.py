"""LoCoJAX: reinforcement-learning post-training of language models on JAX, coordinated host by host."""

__version__ = "0.1.0"
