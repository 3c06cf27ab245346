"""A process that lends memory until its standard input ends: `python lender.py VIA BYTES`.

It prints the descriptor of its grant in hexadecimal digits.
"""

import asyncio
import sys

import msgspec

from kvmesh.settings.schema import TransferSettings
from kvmesh.transfer import Transport

FILLING = 7


async def lend(via: str, size: int) -> None:
    owner = await Transport.open(msgspec.convert({"via": via}, TransferSettings))
    region = owner.register(bytearray([FILLING]) * size)
    print(region.grant([(0, size)], 600).descriptor.hex(), flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(lend(sys.argv[1], int(sys.argv[2])))
