"""GPU memory for a NIC, without a copy in the host (GPUDirect): as a dmabuf, a descriptor that stands for it.

The engine that allocates the memory exports it, its traffic manager takes the descriptor over and sets it as its
Memory's dmabuf before that is registered; from then on transfers read and write the GPU's memory. Host code cannot, so
copies between host and device have to go through the NIC as well: network.rdma.loopback.

Nothing here has run on a GPU yet.
"""

from __future__ import annotations

import ctypes
import os

from common.errors import ConfigError

#: cuda.h: CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
_DMA_BUF_FD = 1
#: The same on every architecture since Linux 5.6; libc has no function for it yet.
_SYS_PIDFD_GETFD = 438


def export_cuda(address: int, size: int) -> int:
    """A new descriptor for CUDA memory [address, address + size), whole pages of the device's. The caller closes it.
    ConfigError if the driver cannot."""
    descriptor = ctypes.c_int(-1)
    try:
        export = ctypes.CDLL("libcuda.so.1").cuMemGetHandleForAddressRange
    except (OSError, AttributeError) as error:
        raise ConfigError(f"GPU memory cannot be exported: {error}: install a CUDA driver of 11.7 or later") from None
    status = export(
        ctypes.byref(descriptor),
        ctypes.c_uint64(address),
        ctypes.c_size_t(size),
        ctypes.c_int(_DMA_BUF_FD),
        ctypes.c_ulonglong(0),
    )
    if status:
        raise ConfigError(
            f"GPU memory cannot be exported (CUDA error {status}): use the open kernel modules of the driver"
        )
    return descriptor.value


def take_over(pid: int, descriptor: int) -> int:
    """Our own descriptor for what another process of this user has open. The caller closes it. OSError."""
    process = os.pidfd_open(pid)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        own: int = libc.syscall(ctypes.c_long(_SYS_PIDFD_GETFD), process, descriptor, 0)
        if own < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return own
    finally:
        os.close(process)
