"""Tensors of frozen weights: 4-bit formats as rows of bytes (`quantized_tensor`), rows of DTensors
(`dtensor`), and the kernels below them (`kernels`).

A format is a subclass of `QuantizedTensor` in its own file (`nf4`, `nf4_fp32_absmax`, `hqq`,
`mxfp4`); with its import it is in `FORMATS`. Modules, sharding and files are in the packages above.
"""

from qfsdp.tensor_subclasses import hqq, mxfp4, nf4, nf4_fp32_absmax, plain  # noqa: F401

# All formats are imported here, so that `torch.load` knows them.
