"""What runs: process groups, parameters at rest, optimizers, state. Knows nothing of how a plan was chosen."""
