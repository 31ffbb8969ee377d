"""Triton kernels, generated from formulas. Nothing here knows of processes, plans or graphs."""
