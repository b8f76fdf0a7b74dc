"""A service that processes orders slowly. docs/tutorial.md shows how to find the causes.

python slow_orders.py            processes orders, and prints their mean time every second python
slow_orders.py --mended   does the same without the problems that the tutorial finds
"""

import copy
import os
import sys
import tempfile
import time

PRICES = {f"item-{number}": {"cents": number, "tags": ["new"]} for number in range(400)}


def look_up(item: str, mended: bool) -> int:
    """Returns the price of an item, in cents."""
    prices = PRICES if mended else copy.deepcopy(PRICES)
    return int(prices[item]["cents"])


def append(journal: int, line: str, mended: bool) -> None:
    """Adds a line to the journal."""
    os.write(journal, line.encode())
    if not mended:
        os.fsync(journal)


def serve(journal: int, mended: bool) -> None:
    """Processes orders until it is stopped, and prints the mean time per order every second."""
    while True:
        started, orders = time.monotonic(), 0
        while time.monotonic() < started + 1:
            cents = look_up(f"item-{orders % len(PRICES)}", mended)
            append(journal, f"order {orders}: {cents}\n", mended)
            orders += 1
            time.sleep(0.001)
        milliseconds = 1_000 * (time.monotonic() - started) / orders
        print(f"{milliseconds:.1f} ms an order", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryFile(dir="/var/tmp") as file:  # /tmp may be in memory
        serve(file.fileno(), "--mended" in sys.argv)
