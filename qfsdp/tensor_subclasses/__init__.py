"""Tensors of frozen weights: 4-bit formats as rows of bytes (`quantized_tensor`), rows of DTensors
(`dtensor`), and the kernels below them (`kernels`).

A format is a subclass of `QuantizedTensor` in its own file (`nf4`, `nf4_fp32_absmax`, `hqq`,
`mxfp4`); with its import it is in `FORMATS`. Modules, sharding and files are in the packages above.
"""

from qfsdp.tensor_subclasses import hqq, mxfp4, nf4, nf4_fp32_absmax, plain  # noqa: F401

# All formats are imported here, so that `torch.load` knows them.

import os

# Memory that PyTorch's CPU allocator takes is mapped in pages of 2 MB where the kernel allows it
# (Linux, "madvise"). With 4 KB pages, dequantizing on a CPU spends 40 % of its time in page faults,
# and 60 % where freed memory is returned (`host_memory.return_freed_memory`): 0.59 and 0.38
# G weights/s against 0.95. PyTorch reads this at its first allocation.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
