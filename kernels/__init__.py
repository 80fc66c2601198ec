"""The maths that the passes put into a decode graph, as plain torch (`reference.py`) and, later, as GPU kernels."""
