"""Tensors of frozen weights: 4-bit formats as rows of bytes (`quantized_tensor`), rows of DTensors
(`dtensor`), and the kernels below them (`kernels`).

A format is a subclass of `QuantizedTensor` in its own file (`nf4`, `nf4_fp32_absmax`, `hqq`,
`mxfp4`); with its import it is in `FORMATS`. Modules, sharding and files are in the packages above.
"""

import os

# PyTorch's CPU allocator reads this once, at its first tensor, so it stands before all imports:
# large tensors in pages of 2 MB where the kernel allows that (Linux). With pages of 4 KB, page
# faults are 40 % of the time of dequantizing on a CPU, and 60 % where freed memory is returned
# (`kernels.host_memory.return_freed_memory`): 0.59 and 0.38 G weights/s per core, against 0.95.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

from qfsdp.tensor_subclasses import hqq, mxfp4, nf4, nf4_fp32_absmax, plain  # noqa: E402, F401

# All formats are imported here, so that `torch.load` knows them.
