"""Peak memory of this process while something runs."""

from __future__ import annotations

import threading
import time


class PeakMemory(threading.Thread):
    """Samples this process's anonymous memory until `stop`; `peak` is in bytes above the start."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before, self.peak, self._stopped = private_bytes(), 0, False
        self.start()

    def run(self) -> None:
        while not self._stopped:
            self.peak = max(self.peak, private_bytes() - self.before)
            time.sleep(0.002)

    def stop(self) -> int:
        self._stopped = True
        self.join()
        return max(self.peak, private_bytes() - self.before)


def private_bytes() -> int:
    with open("/proc/self/status") as status:
        return next(int(s.split()[1]) * 1024 for s in status if s.startswith("RssAnon"))
