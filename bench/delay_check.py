"""`python -m bench.delay_check`: how far the round trips of a `delay_proxy` are from what was asked.

Must not know: Draftwire. It takes the priority that the proxy has, so that on a busy machine the proxy is measured.
"""

from __future__ import annotations

import argparse
import json
import socket
import time

from bench.delay_line import Shape
from bench.delay_proxy import DelayProxy, take_priority


def ping_pong(rtt_ms: float, count: int, pause_s: float = 0.005) -> list[float]:
    """Round trips of 64 bytes through the proxy beyond `rtt_ms`, sorted, in ms."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with DelayProxy(address, Shape(rtt_ms)) as proxy:
            host, port = proxy.address.split(":")
            with socket.create_connection((host, int(port))) as near, listener.accept()[0] as far:
                for end in (near, far):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                beyond = []
                for _ in range(count):
                    began = time.perf_counter()
                    near.sendall(b"x" * 64)
                    far.sendall(far.recv(64))
                    near.recv(64)
                    beyond.append(1000 * (time.perf_counter() - began) - rtt_ms)
                    time.sleep(pause_s)
    return sorted(beyond)


def main() -> None:
    """Prints one JSON line for each round trip."""
    parser = argparse.ArgumentParser(prog="python -m bench.delay_check", description=__doc__)
    parser.add_argument("--rtt-ms", default="0,20,50,100,200", metavar="N,N", help="default: 0,20,50,100,200")
    parser.add_argument("--pings", type=int, default=100, metavar="N", help="for each (default: 100)")
    args = parser.parse_args()
    take_priority()
    for rtt_ms in map(float, args.rtt_ms.split(",")):
        beyond = ping_pong(rtt_ms, args.pings)
        shown = {f"p{share}": round(beyond[len(beyond) * share // 100], 3) for share in (1, 50, 99)}
        print(json.dumps({"rtt_ms": rtt_ms, "beyond_ms": {**shown, "max": round(beyond[-1], 3)}}), flush=True)


if __name__ == "__main__":
    main()
