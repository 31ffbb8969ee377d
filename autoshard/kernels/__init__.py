"""Triton kernels, generated from formulas or graphs. Nothing here knows of processes or plans."""
