"""Tensors of frozen weights: 4-bit formats as rows of bytes (`quantized_tensor`), rows of DTensors
(`dtensor`), and the kernels below them (`kernels`).

A format is a subclass of `QuantizedTensor` in its own file (`nf4`, `nf4_fp32_absmax`, `hqq`); with
its import it is in `FORMATS`. Modules, sharding and files are in the packages above.
"""
