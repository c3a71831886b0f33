"""Faults that users meet: what runs do about them, and what commands say about bad inputs."""

import os
import warnings

from qfsdp.common.quiet import quiet_torchao

# Before torch is imported, here and in the server that forks the ranks.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("QFSDP_EAGER_KERNELS", "1")
quiet_torchao()
warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # while states are read
