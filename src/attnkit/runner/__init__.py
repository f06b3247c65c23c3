"""The runner: checkpoints, models driven as one packed stream, scheduling, sampling, text."""
