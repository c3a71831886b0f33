"""Frozen linears and low-rank products beside them, as operations with gradients written out.

`linear` has the modules and DoRA's norms, `product` the operation and its gradient, `copies` A and
B as they are multiplied, `several` the operation of several adapters. Adapters and mixtures of
experts are built on them.
"""
