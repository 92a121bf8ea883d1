"""Tokens -> hidden states -> log-probs. One definition, used by trainer and sampler alike."""
