"""Targets with random weights, and sessions on them in this thread: what `gpu_check` measures on.

No download, no draft model, no gRPC: on a machine without network the product's own Session, Scheduler, Judge and
StepRunner run over a model of the right shape. Called by `gpu_check`.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import transformers

from cloud_verifier.hf import CausalLm
from cloud_verifier.judge import Judge
from cloud_verifier.kv_pages import PAGE_TOKENS
from cloud_verifier.kv_pool import token_bytes
from cloud_verifier.reports import NoObserver, StepReport
from cloud_verifier.scheduler import Scheduler
from cloud_verifier.sessions import Session
from cloud_verifier.settings import VerifierConfig
from cloud_verifier.step_cost import StepCost
from cloud_verifier.target_model import TorchTarget
from cloud_verifier.worker import Worker
from shared.errors import DraftwireError
from shared.sampling import GREEDY, SamplingParams
from shared.types import DownFrame, Epoch, Fault, Hint, Open, Pace, PaceKind, SessionId


@dataclass(frozen=True)
class Shape:
    """A Qwen2 model's sizes."""

    hidden: int
    layers: int
    heads: int
    key_heads: int
    intermediate: int
    vocabulary: int


SHAPES = {
    "tiny": Shape(128, 2, 4, 2, 192, 512),
    "1.5b": Shape(1536, 28, 12, 2, 8960, 151_936),
    "7b": Shape(3584, 28, 28, 4, 18_944, 152_064),
}
SPREAD = 2.0
"""Standard deviation of the scores of ids that nothing speaks for."""
LEAD = 5.0
"""By how much, on average, the one id that the last one speaks for leads the best of the others."""


# ---------------------------------------------------------------- models


def random_target(shape: Shape, dtype: torch.dtype, device: str, kv_tokens: int, seed: int = 1) -> TorchTarget:
    """A target of this shape with random weights, made where it is to stand, with room for so many tokens."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(_config(shape), dtype=dtype, attn_implementation="sdpa")
    _fill(model.eval(), shape)
    lm = CausalLm(model)
    kv_bytes = (kv_tokens + PAGE_TOKENS) * token_bytes(lm.kv_shapes(), dtype)
    return TorchTarget(lm, int(lm.config.max_position_embeddings), kv_bytes)


def weight_bytes(target: TorchTarget) -> int:
    """What a step reads at least: all weights but the input embeddings."""
    model = target.lm.model
    embedding = model.get_input_embeddings().weight
    return int(sum(each.nbytes for each in model.parameters()) - embedding.nbytes)


def _config(shape: Shape) -> transformers.Qwen2Config:
    """The head is a matrix of its own, also where the published model ties it: a step reads as many bytes."""
    return transformers.Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        max_position_embeddings=32_768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=False,
        use_sliding_window=False,
        bos_token_id=None,
        eos_token_id=None,
    )


@torch.no_grad()
def _fill(model: transformers.PreTrainedModel, shape: Shape) -> None:
    """Weights that keep the size of what passes through, and a head that makes scores like a trained model's.

    With a plain random head the best two of 150,000 ids are so close that bfloat16 flips every twentieth choice. Here
    each id speaks for one other (a permutation): that one leads the rest by LEAD on average, now more, now less, since
    the rest depend on the whole context. So greedy text is no single id for ever, most choices are clear, and some are
    open: at temperature 1 about every second one.
    """
    for name, weights in model.named_parameters():
        if weights.dim() == 2:
            gain = 2.0 if "q_proj" in name else 1.0
            gain /= math.sqrt(2 * shape.layers) if "o_proj" in name or "down_proj" in name else 1.0
            weights.normal_(0.0, gain / math.sqrt(weights.shape[1]))
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    embedding.normal_(0.0, 0.5)
    device = embedding.device
    ids = torch.randint(shape.vocabulary, (1, 256), device=device)
    states = model.model(input_ids=ids, use_cache=False).last_hidden_state[0].float()
    known = torch.nn.functional.normalize(embedding[ids[0]].float(), dim=1)
    carried = float((states * known).sum(1).mean())  # how much of the last id is left at the end
    wanted = SPREAD * math.sqrt(2 * math.log(shape.vocabulary)) + LEAD
    head.normal_(0.0, math.sqrt(max(0.25, SPREAD**2 - (wanted / carried) ** 2) / shape.hidden))
    successors = torch.randperm(shape.vocabulary, device=device)
    for start in range(0, shape.vocabulary, 16_384):  # in parts: no whole copy in float32
        part = slice(start, start + 16_384)
        spoken = torch.nn.functional.normalize(embedding[part].float(), dim=1) * (wanted / carried)
        head[successors[part]] += spoken.to(head.dtype)


# ---------------------------------------------------------------- sessions


class FreeTokens(StepCost):
    """Tokens cost next to nothing, whatever is measured: every hint is worth verifying."""

    def seconds(self, tokens: int) -> float:
        """See StepCost."""
        return 1 + 1e-4 * tokens


@dataclass(frozen=True)
class Script:
    """What one session is to write: a context, parameters, and hints."""

    context: tuple[int, ...]
    sampling: SamplingParams = GREEDY
    seed: int = 1
    hints: tuple[int, ...] = ()
    """The id that is hinted at each generated place; none for a streamed run."""


def random_context(tokens: int, vocabulary: int, seed: int) -> tuple[int, ...]:
    """Ids drawn by a seed."""
    return tuple(random.Random(seed).choices(range(vocabulary), k=tokens))


def spoiled(ids: Sequence[int], share: float, vocabulary: int, seed: int) -> tuple[int, ...]:
    """The ids with a share of wrong ones among them, drawn by a seed."""
    rng = random.Random(seed)
    return tuple((token + 1) % vocabulary if rng.random() < share else token for token in ids)


class _Sink:
    """A device that reads everything and remembers only an error."""

    def __init__(self) -> None:
        self.fault: Fault | None = None

    def send(self, frame: DownFrame) -> None:
        """See Sink."""
        self.fault = frame if isinstance(frame, Fault) else self.fault

    def end(self, error: DraftwireError | None) -> None:
        """See Sink."""


@dataclass
class Seat:
    """One session at a desk."""

    session: Session
    script: Script
    chain: int
    steps: int = 0

    @property
    def ids(self) -> list[int]:
        """What it wrote."""
        return self.session.ids[self.session.generated_from :]

    def hint(self, ack: int) -> None:
        """Sends the chain that the script has for the place reached."""
        session, place = self.session, len(self.ids)
        ids = self.script.hints[place : place + self.chain]
        if ids and session.finished is None:
            first = session.trie.highest_number + 1
            session.hint(Hint(Epoch(0), first, ids, ack, base_position=session.length))


@dataclass
class Desk(NoObserver):
    """A verifier without threads and without gRPC, with the product's default settings else."""

    target: TorchTarget
    cost: StepCost
    """Handed in, since a verifier keeps what it has measured."""
    ends_at: float
    """By time.monotonic: no step begins later."""
    batch_nodes: int
    """Hint nodes of all sessions verified in one step at most."""
    principal: str = ""
    """Desks of one name find each other's pages."""
    seats: list[Seat] = field(default_factory=list)
    reports: list[StepReport] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = VerifierConfig()
        valid = np.ones(int(self.target.lm.config.vocab_size), np.bool_)
        self.limits = config.limits
        self.scheduler = Scheduler(replace(config.budget, nodes=self.batch_nodes), self.cost)
        self.judge = Judge(valid, self.target.lm.model.device)
        self._worker = Worker(self.target, self.judge, self.scheduler, observer=self)
        self._is_let_go = False

    def step(self, report: StepReport) -> None:
        """See Observer."""
        self.reports.append(report)

    def open(self, script: Script, tokens: int, chain: int) -> Seat:
        """A session that is to write one id, and waits then without a hint (see `let_go`)."""
        frame = Open(
            ids=script.context,
            generated_from=len(script.context),
            fingerprint=bytes(32),
            sampling=script.sampling,
            max_new_tokens=tokens,
            seed=script.seed,
            pace=PaceKind.RUN_ON,
            run_ahead=1,
        )
        session = Session(
            id=SessionId(len(self.seats).to_bytes(16, "big")),
            opened_with=frame,
            seed=script.seed,
            slot=self.target.new_slot(self.principal),
            limits=self.limits,
            context_size=self.target.context_size,
            target_id=bytes(32),
            now=time.monotonic(),
        )
        session.sink = _Sink()
        self.scheduler.add(session)
        self.seats.append(Seat(session, script, chain))
        return self.seats[-1]

    def let_go(self) -> None:
        """All sessions may write to their ends, and are sent hints."""
        self._is_let_go = True
        for seat in self.seats:
            session = seat.session
            session.set_pace(Pace(Epoch(0), PaceKind.RUN_ON, session.limits.max_new_tokens, session.length))
            seat.hint(session.length)

    def maybe_step(self) -> bool:
        """Runs one step, after which devices answer with hints at once; False if nobody may write, or time is up.

        Raises: DraftwireError if a session failed.
        """
        started = time.monotonic()
        plan = self.scheduler.plan(started) if started < self.ends_at else None
        if plan is None:
            return False
        before = {id(row.session): row.session.length for row in plan.rows}
        self._worker.run_step(plan, time.monotonic() - started)
        for seat in self.seats:
            sink = seat.session.sink
            if isinstance(sink, _Sink) and sink.fault is not None:
                raise DraftwireError(f"a session failed: {sink.fault.message}")
            if seat.session.length > before.get(id(seat.session), seat.session.length):
                seat.steps += 1
                if self._is_let_go:
                    seat.hint(seat.session.length)
        return True

    def close(self) -> None:
        """All sessions go."""
        for seat in self.seats:
            self._worker.drop(seat.session, "finished")
        self.seats.clear()
