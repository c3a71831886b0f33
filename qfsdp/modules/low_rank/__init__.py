"""Frozen linears and low-rank products beside them, as operations with gradients written out.

`product` has the operation for one linear, `grouped` for linears with the same input, `autograd`
what is kept for backward. Adapters and mixtures of experts are built on them.
"""
