"""A clock that is read without a system call. Under a kernel without a vDSO (a guest in user mode) time.perf_counter()
is one, and takes longer than what is to be measured."""

from __future__ import annotations

import ctypes
import mmap
import platform
import time

#: How long the rate of the counter is measured, seconds.
CALIBRATION_S = 0.5
#: rdtsc; shl rdx, 32; or rax, rdx; ret
_READ_COUNTER = bytes.fromhex("0f31 48c1e220 4809d0 c3")


class CycleClock:
    """Called: seconds since some moment, by the processor's time stamp counter, which is one for all cores and runs at
    a constant rate on every x86-64 of today; elsewhere by time.perf_counter()."""

    def __init__(self) -> None:
        self._read, self._rate = time.perf_counter, 1.0
        if platform.machine() == "x86_64":
            self._code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
            self._code.write(_READ_COUNTER)
            start = ctypes.addressof(ctypes.c_char.from_buffer(self._code))
            self._read = ctypes.PYFUNCTYPE(ctypes.c_uint64)(start)
            self._calibrate()

    def _calibrate(self) -> None:
        begun, counted = time.perf_counter(), self._read()
        time.sleep(CALIBRATION_S)
        self._rate = (self._read() - counted) / (time.perf_counter() - begun)

    def __call__(self) -> float:
        return self._read() / self._rate
