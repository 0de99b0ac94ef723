"""The same question about many pictures at once: python examples/many.py QUESTION PICTURE..."""

import asyncio
import os
import sys

import saccade


async def main(question: str, pictures: list[str]) -> None:
    at_once = asyncio.Semaphore(32)

    async with saccade.AsyncClient(os.environ.get("SACCADE_SERVER", "127.0.0.1:50051")) as client:

        async def ask(picture: str) -> str:
            async with at_once:
                try:
                    return (await client.generate(question, images=[picture], temperature=0)).text
                except saccade.SaccadeError as error:  # one bad picture is no reason to lose the others
                    return f"failed: {error}"

        for picture, answer in zip(pictures, await asyncio.gather(*map(ask, pictures)), strict=True):
            print(f"{picture}: {answer}")


asyncio.run(main(sys.argv[1], sys.argv[2:]))
