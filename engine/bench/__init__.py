"""Measuring the engine from inside: for `octavo bench steps | kernels | paper | memory | quality`."""
