"""python switch.py SECONDS DEVICE …: an Ethernet switch that delays each frame.

Its ports are TAP devices. The kernel passes each frame that leaves such a device to this process.
Many kernels lack `netem`, the kernel's own delay, and this switch works without it.
"""

import collections
import fcntl
import os
import select
import struct
import sys
import time

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
LARGEST_FRAME = 65536


def open_tap(name: str) -> int:
    """Make a TAP device; returns the file for reading and writing its frames."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return file


def forward(ports: list[int], delay: float) -> None:
    """Forward each frame after `delay` s, to the port where its target was last seen."""
    port_of = {}
    waiting = collections.deque()
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for port in select.select(ports, [], [], timeout)[0]:
            try:
                frame = os.read(port, LARGEST_FRAME)
            except OSError:  # the device is down
                time.sleep(0.01)
                continue
            target, source = frame[:6], frame[6:12]
            port_of[source] = port
            waiting.append((time.monotonic() + delay, port, port_of.get(target), frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, port, target, frame = waiting.popleft()
            for other in [target] if target else set(ports) - {port}:
                try:
                    os.write(other, frame)
                except OSError:  # the device is down: the frame is lost, as on any network
                    pass


if __name__ == "__main__":
    seconds, *names = sys.argv[1:]
    taps = [open_tap(name) for name in names]
    print("ready", flush=True)
    forward(taps, float(seconds))
