"""`python -m bench link`: tokens/s through a link with a round-trip time, against what could be done instead.

The verifier is pinned to one core with one thread, the device to the other; the link is a process of its own. For each
prompt all variants run one after another, in an order that is rotated from prompt to prompt, so that drift of the
machine hits all alike. Identity: the ids of all are those of cloud streaming, else the exit code is 1.
Before a prompt is measured, verifier and draft have read it once: what is compared is writing, not reading.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from bench import baselines
from bench.bare_session import Job, Outcome
from bench.baselines import Device
from bench.degraded import DegradedModel, agreement
from bench.delay_line import Shape
from bench.delay_proxy import DelayProxy
from bench.exactness import RULES, SEED, encoded_prompts
from bench.link_settings import Settings, add_arguments, settings_of
from bench.link_table import DRAFT_ONLY, DRAFTWIRE_PREFIX, RPC, STREAMING, WAIT_PREFIX, cell, first_difference, table
from bench.pairs import Pair, pair, prompt_source
from bench.processes import VerifierProcess, machine, pin_self
from edge_client.client import SpeculativeClient
from edge_client.client_config import ClientConfig
from edge_client.controller import Experience
from edge_client.drafter import Budget, ModelDrafter
from edge_client.onnx_drafter import OnnxModel
from edge_client.tokenizer import TextTokenizer
from edge_client.transport import GrpcTransport
from shared.model_store import resolve
from shared.types import PaceKind

VERIFIER_CORE, DEVICE_CORE = 0, 1
MAX_WAIT_MS = 1000
"""Above any round trip and draft: nobody who waits for hints is run for want of them."""
CALIBRATION_TEXTS = 4

Variant = Callable[[Job], Awaitable[Outcome]]


def add_parser(subparsers: Any) -> None:
    """The subcommand."""
    command = subparsers.add_parser(
        "link",
        help="tokens/s through a link, against streaming and propose-and-wait",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(command)
    command.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Measures and prints; 0 if all ids are those of cloud streaming."""
    settings = settings_of(args)
    chosen, here = pair(settings.pair_name), machine()
    load = round(os.getloadavg()[0], 2)
    options = ("--max-wait-ms", str(MAX_WAIT_MS))
    with VerifierProcess(chosen.target, {VERIFIER_CORE}, threads=1, options=options) as verifier:
        pin_self({DEVICE_CORE})
        measured = asyncio.run(Bench(chosen, settings).measure(verifier.address))
    result = {
        "machine": here,
        "load_before": load,
        "pair": settings.pair_name,
        "rule": settings.rule,
        "drafts": settings.drafts,
        "prompts": settings.prompts,
        "prompt_source": prompt_source(),
        "tokens": settings.tokens,
        "repeats": settings.repeats,
        "jitter_ms": settings.jitter_ms,
        "up_bytes_per_s": settings.up_bytes_per_s,
        "draftwire": settings.given,
        **measured,
    }
    print(json.dumps(result) if args.json else table(result))
    return 0 if not any(each["differences"] for each in result["cells"]) else 1


class Bench:
    """One draft model for all; a link, a transport and a client for each round trip."""

    def __init__(self, chosen: Pair, settings: Settings) -> None:
        folder = resolve(chosen.draft, "draft", chosen.precision)
        self._settings = settings
        self._config = ClientConfig(draft=chosen.draft, precision=chosen.precision, timeout_s=30)
        self._tokenizer = TextTokenizer(folder)
        model = OnnxModel(folder, threads=1)
        valid = self._tokenizer.vocabulary.valid_mask(model.vocabulary_rows)
        self._model = DegradedModel(model, valid)
        self._drafter = ModelDrafter(self._model, valid)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="bench-draft")
        self._jobs = [
            Job(tuple(ids), settings.tokens, RULES[settings.rule], SEED + number)
            for number, ids in enumerate(encoded_prompts(chosen, settings.prompts))
        ]

    async def measure(self, verifier: str) -> dict[str, Any]:
        """Calibrates the drafter, then one cell after another."""
        measured = {**await self._calibrate(verifier), "cells": []}
        first: Sequence[Outcome] = ()
        for rtt_ms in self._settings.rtts_ms:
            texts, tcp, cpu_s = await self._texts(verifier, rtt_ms)
            found = cell(rtt_ms, texts, tcp, len(self._jobs), self._settings.drafts)
            first = first or texts[STREAMING]
            for number, (ours, theirs) in enumerate(zip(texts[STREAMING], first, strict=True)):
                if (at := first_difference(ours.ids, theirs.ids)) is not None:
                    found["differences"].append({"variant": f"{STREAMING} at {rtt_ms:g} ms", "text": number, "at": at})
            found["proxy_cpu_s"] = round(cpu_s, 2)
            measured["cells"].append(found)
        self._executor.shutdown()
        return measured

    async def _calibrate(self, verifier: str) -> dict[str, Any]:
        """How often the draft is right, and how often it must be spoilt to be right as often as is asked."""
        async with self._client(verifier, self._transport(verifier)) as client:
            jobs = self._jobs[:CALIBRATION_TEXTS]
            texts = [(job, (await baselines.cloud_streaming(client, job)).ids) for job in jobs]

            def mean() -> float:
                shares = [
                    agreement(self._drafter, baselines.task_of(j, client.card), j.prompt, ids) for j, ids in texts
                ]
                return sum(shares) / len(shares)

            natural = await asyncio.to_thread(mean)
            self._model.is_useless = self._settings.is_random
            self._model.keep = min(1.0, self._settings.degrade / max(natural, 1e-9)) if self._settings.degrade else 1.0
            self._drafter = ModelDrafter(self._model, self._model.valid_ids)
            self._model.rewind(0)
            used = natural if self._settings.drafts == "model" else await asyncio.to_thread(mean)
        return {"agreement": round(used, 3), "agreement_of_the_model": round(natural, 3)}

    def _transport(self, address: str) -> GrpcTransport:
        vocabulary = self._tokenizer.vocabulary
        return GrpcTransport(address, vocabulary.valid_mask(vocabulary.size), timeout_s=30)

    def _client(self, address: str, transport: GrpcTransport) -> SpeculativeClient:
        config = replace(self._config, verifier=address, **self._settings.given)
        return SpeculativeClient(config, transport=transport, drafter=self._drafter, tokenizer=self._tokenizer)

    async def _texts(
        self, verifier: str, rtt_ms: float
    ) -> tuple[dict[str, list[Outcome]], dict[str, tuple[int, int]], float]:
        """Per variant the outcomes and the bytes at the proxy; and the proxy's CPU time."""
        settings = self._settings
        with DelayProxy(verifier, Shape(rtt_ms, settings.jitter_ms, settings.up_bytes_per_s, seed=SEED)) as proxy:
            transport = self._transport(proxy.address)
            async with self._client(proxy.address, transport) as client:
                device = Device(transport, client.card, self._drafter, self._executor)
                variants = wanted(variants_of(device, client, settings.lengths), settings.only)
                texts: dict[str, list[Outcome]] = {name: [] for name in variants}
                tcp = dict.fromkeys(variants, (0, 0))
                await self._warm(variants, replace(self._jobs[0], tokens=8))
                for repeat in range(settings.repeats):
                    for number, job in enumerate(self._jobs):
                        await self._warm(variants, replace(job, tokens=1))
                        for name in rotated(list(variants), number + repeat):
                            before = proxy.counts()
                            texts[name].append(await variants[name](job))
                            after = proxy.counts()
                            tcp[name] = (tcp[name][0] + after[0] - before[0], tcp[name][1] + after[1] - before[1])
                        say(f"{rtt_ms:g} ms: {repeat * len(self._jobs) + number + 1} texts of each")
            return texts, tcp, proxy.cpu_s()

    async def _warm(self, variants: dict[str, Variant], job: Job) -> None:
        """Both ends read the prompt."""
        await variants[STREAMING](job)
        await variants[DRAFT_ONLY](job)


def variants_of(device: Device, client: SpeculativeClient, lengths: Sequence[int]) -> dict[str, Variant]:
    """Everything that is compared, by name."""
    budgets = {f"{WAIT_PREFIX}{length}": Budget(length) for length in lengths}
    budgets |= {f"{WAIT_PREFIX}tree of {tree.depth} x {tree.width}": tree for tree in baselines.TREES}

    def waiting(budget: Budget) -> Variant:
        return lambda job: baselines.propose_and_wait(device, job, budget)

    def draftwire(pace: PaceKind) -> Variant:
        experience = Experience()  # of its own: the other paces have written the same texts

        async def write(job: Job) -> Outcome:
            client.experience = experience
            return baselines.of_result(await client.generate(**baselines.options(job), pace=pace))

        return write

    return {
        STREAMING: lambda job: baselines.cloud_streaming(client, job),
        RPC: lambda job: baselines.one_rpc_per_token(device, job),
        **{name: waiting(budget) for name, budget in budgets.items()},
        DRAFT_ONLY: lambda job: baselines.draft_only(device, job),
        **{
            f"{DRAFTWIRE_PREFIX}{pace.value}": draftwire(pace)
            for pace in (PaceKind.RUN_ON, PaceKind.WAIT, PaceKind.AUTO)
        },
    }


def wanted(variants: dict[str, Variant], only: Sequence[str]) -> dict[str, Variant]:
    """Those whose name holds one of the words, and what all are compared with."""
    always = (STREAMING, DRAFT_ONLY)
    return {
        name: variant
        for name, variant in variants.items()
        if not only or name in always or any(word in name for word in only)
    }


def rotated(names: list[str], by: int) -> list[str]:
    """The same names, begun at another one."""
    by %= len(names)
    return names[by:] + names[:by]


def say(text: str) -> None:
    """A line about how far it is, on stderr."""
    print(text, file=sys.stderr, flush=True)
