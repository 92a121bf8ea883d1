"""What reinforcement learning needs besides a model: prompts, rewards, advantages, training data. No jax in here.

The way through: `datasets`/`tasks` make prompts, `batches` orders them, `seeds` seeds their samples, `grading` runs
`rewards` in killable processes, `advantages` compares a group's rewards, `datums` turns groups into training sequences.
"""
