"""What things cost: bytes by category and seconds by collective. Knows nothing of processes or rewriting."""
