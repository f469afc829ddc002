"""The blocking client interrupted in mid text: both sides stop, and the client goes on serving."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys

from cloud_verifier.loading import LoadedTarget
from tests.rig import held_after, serving
from tests.tiny_pair import TinyPair

PROGRAM = """
import sys
from edge_client import BlockingClient, ClientConfig, Committed
from shared.sampling import GREEDY

with BlockingClient(ClientConfig(verifier=sys.argv[1], draft=sys.argv[2], hint_tokens=1)) as client:
    try:
        for event in client.stream("the cat", max_new_tokens=480, sampling=GREEDY, stop_ids=()):
            if isinstance(event, Committed):
                print("begun", flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    print(len(client.generate("the cat", max_new_tokens=5, sampling=GREEDY, stop_ids=()).ids), flush=True)
"""


async def test_ctrl_c_in_a_blocking_stream_ends_the_text_and_leaves_the_client_usable(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair
) -> None:
    async with serving(loaded_tiny) as running:
        gate = held_after(running, 6)  # the text is not over when the signal comes
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-c", PROGRAM, running.address, str(tiny_pair.same_draft)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert child.stdout is not None
        assert await child.stdout.readline() == b"begun\n"
        child.send_signal(signal.SIGINT)
        while (line := await child.stdout.readline()) == b"begun\n":
            pass
        gate.set()
        out, err = await child.communicate()
        assert (line, out, err) == (b"interrupted\n", b"5\n", b"")
        assert child.returncode == 0
        await running.settled(lambda: running.sessions == 0)
