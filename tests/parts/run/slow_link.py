"""A slow link of a machine in a network namespace, for kernels without netem: `python slow_link.py ADDRESS DELAY_S LOSS`.

Runs on that machine. Its address moves to a TAP device. This process copies frames between that device and `eth0`; those that leave
the machine are delayed, and some are lost. Ends, and puts the address back, when its standard input is closed. Only the standard
library.
"""

import fcntl
import os
import random
import select
import socket
import struct
import subprocess
import sys
import time
from collections import deque

SIOCGIFHWADDR = 0x8927
TUNSETIFF, IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x400454CA, 0x0002, 0x1000, 0x4000
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING, ETH_P_ALL = 263, 15, 23, 0x0003
FRAME_BYTES = 70_000
"""The kernel passes on several segments of TCP as one frame. The header in front of each frame says how to divide it."""
TAP, LINK = "slow0", "eth0"
OTHER_HARDWARE_ADDRESS = "02:00:00:00:00:77"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def open_tap() -> int:
    tap = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH14x", TAP.encode(), IFF_TAP | IFF_NO_PI | IFF_VNET_HDR))
    return tap


def open_link() -> socket.socket:
    link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    link.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    link.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    link.bind((LINK, 0))
    return link


def copy_frames(tap: int, link: socket.socket, *, delay_s: float, loss: float) -> None:
    """Until standard input is closed."""
    leaving: deque[tuple[float, bytes]] = deque()
    while True:
        wait_s = max(0.0, leaving[0][0] - time.monotonic()) if leaving else None
        readable, _, _ = select.select([tap, link, sys.stdin], [], [], wait_s)
        if sys.stdin in readable:
            return
        if tap in readable:
            frame = os.read(tap, FRAME_BYTES)
            if random.random() >= loss:
                leaving.append((time.monotonic() + delay_s, frame))
        if link in readable:
            os.write(tap, link.recv(FRAME_BYTES))
        while leaving and leaving[0][0] <= time.monotonic():
            link.send(leaving.popleft()[1])


def main(address: str, delay_s: str, loss: str) -> None:
    tap, link = open_tap(), open_link()
    hardware = fcntl.ioctl(link, SIOCGIFHWADDR, struct.pack("40s", LINK.encode()))[18:24].hex(":")
    # Other machines know the hardware address, so it moves too.
    ip("link", "set", LINK, "address", OTHER_HARDWARE_ADDRESS, "arp", "off", "promisc", "on")
    ip("link", "set", TAP, "address", hardware, "up")
    ip("address", "del", f"{address}/24", "dev", LINK)
    ip("address", "add", f"{address}/24", "dev", TAP)
    sys.stdout.write("slow\n")
    sys.stdout.flush()
    try:
        copy_frames(tap, link, delay_s=float(delay_s), loss=float(loss))
    finally:
        ip("address", "del", f"{address}/24", "dev", TAP)
        os.close(tap)
        ip("link", "set", LINK, "address", hardware, "arp", "on", "promisc", "off")
        ip("address", "add", f"{address}/24", "dev", LINK)


if __name__ == "__main__":
    main(*sys.argv[1:])
