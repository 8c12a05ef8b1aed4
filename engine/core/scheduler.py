"""Scheduler: which tokens the next step computes.

There is no prefill phase and no decode phase (Orca's iteration-level scheduling, OSDI 2022; chunked prefill as
in Sarathi-Serve, OSDI 2024): a sequence knows tokens and has KV for some of them; each step computes the next
few. Prefix hits, recomputing after preemption, drafts and resuming after a crash are the same arithmetic.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from engine.api import AddRequest, FinishReason
from engine.core.admission import Limits
from engine.core.beam import BeamSearch
from engine.core.constraint import ConstraintFactory
from engine.core.ledger import Ledger
from engine.core.life import Life
from engine.core.outcome import Item, Outcome
from engine.core.plan import Geometry, Plan, Result, Row, SlotParams
from engine.core.proposer import Ask, Proposer
from engine.core.request import Request, Sequence, Status
from engine.core.rows import allowed_drafts, followers_of, row_of
from engine.core.settings import CoreSettings
from engine.kv import KVManager
from engine.kv.costs import Costs

LOOKAHEAD = 8  # steps that those who run can grow after an admission before someone must give way
SMALLEST_CHUNK = 16  # prompt tokens that a step takes in any case, however short it is to be


class Scheduler:
    """`schedule` and `update` alternate; with overlap a plan is made before the last result has come."""

    def __init__(
        self,
        kv: KVManager,
        costs: Costs,
        geometry: Geometry,
        settings: CoreSettings,
        eos_token_ids: frozenset[int],
        constraints: ConstraintFactory | None,
        proposer: Proposer | None,
        clock: Callable[[], float],
    ) -> None:
        slots = min(settings.max_num_seqs, geometry.max_num_seqs)
        self.ledger = Ledger()
        self.life = Life(kv, costs, self.ledger, slots, settings.preemption, proposer, clock)
        self._outcome = Outcome(kv, self.ledger, self.life, clock)
        self._kv = kv
        self._costs = costs
        self._settings = settings
        self._eos = eos_token_ids
        self._constraints = constraints
        self._proposer = proposer
        self._clock = clock
        self._max_len = min(geometry.max_model_len, kv.max_tokens + 1)  # the last token needs no KV
        self.guessing = False  # has any running sequence a guess that is worth a try?
        self.guess_s = 0.0  # total time that guessing took
        self._limits = Limits(geometry.max_model_len, kv.max_tokens, geometry.vocab_size)
        self._watermark = math.ceil(settings.watermark * geometry.num_blocks)
        self._block_size = geometry.block_size
        self._compiling: list[Request] = []
        self._picked: dict[Sequence, int] = {}  # tokens that the plan in the making computes of each
        self._flights: dict[int, list[Item]] = {}  # submitted steps
        self._step = 0

    @property
    def waiting_requests(self) -> int:
        return len(self.ledger.requests) - self.life.running.requests

    # ---------------------------------------------------------------- coming and going

    def add(self, add: AddRequest) -> None:
        """Accept a request, or refuse it with a terminal delta for each of its choices."""
        kind, problem = self._refusal(add)
        if kind:
            self.ledger.refuse(add, kind, problem)
            return
        now = self._clock()
        request = Request(add, max_len=self._max_len, eos=self._eos, now=now)
        self.ledger.enter(request)
        request.note(now, "queued", prompt_tokens=request.prompt_len, resumed=bool(add.resume))
        if add.params.beam_width:
            request.beam = BeamSearch(add.params, request.prompt_len, request.end, request.stops)
        for choice in range(1 if request.beam else add.params.n):
            resumed = add.resume[choice] if choice < len(add.resume) and not request.beam else ()
            if resumed:
                request.told.add(choice)
            request.sequences.append(self.life.bear(request, choice, [*add.prompt, *resumed]))
        if add.params.grammar is not None and self._constraints is not None:
            request.grammar = self._constraints(add.params.grammar)
            self._compiling.append(request)
        else:
            self._begin(request)

    def _refusal(self, add: AddRequest) -> tuple[str, str]:
        """(kind, why) of a refusal, or ("", "")."""
        if add.id in self.ledger.requests:
            return "invalid", f"request id {add.id!r} is in use"
        if add.params.grammar is not None and self._constraints is None:
            return "invalid", "this engine has no grammar support"
        if problem := self._limits.problem(add):
            return "invalid", problem
        limit, waiting = self._settings.max_waiting, self.waiting_requests
        if limit and not add.resume and waiting >= limit + self.life.running.free_slots:
            return "overloaded", f"{waiting} requests are waiting; the limit is {limit}"
        return "", ""

    def _begin(self, request: Request) -> None:
        """Queue the first choice; the others fork from it once it has the prompt's KV."""
        for seq in list(request.sequences):
            if request.grammar is not None:
                seq.constraint = request.grammar.fork()
                if not all(seq.constraint.advance(token) for token in seq.output):
                    error = "the tokens so far don't match the grammar"
                    self.life.end(seq, FinishReason.ERROR, error=error, kind="failed")
                    continue
            self._end_if_done(seq)
        for seq in request.sequences[1:]:
            seq.to(Status.FOLLOWING)
        if request.sequences:
            self.life.wait(request.sequences[0])

    def _end_if_done(self, seq: Sequence) -> None:
        """A choice that was resumed after its last token, or that wants none, ends without a step."""
        output = seq.output
        if output and output[-1] in seq.stops:
            self.life.end(seq, FinishReason.STOP, stop_token=output[-1])
        elif seq.constraint is not None and seq.constraint.stopped():
            self.life.end(seq, FinishReason.STOP)
        elif len(seq.tokens) >= seq.end and (output or not (seq.request.scored or seq.request.add.pooling)):
            self.life.end(seq, FinishReason.LENGTH)

    def _begin_compiled(self) -> None:
        """Requests whose grammar has become ready join the queue; they hold no one up before that."""
        still: list[Request] = []
        for request in self._compiling:
            grammar = request.grammar
            if request.finished is not None or grammar is None:
                continue
            if problem := grammar.failed():
                self.life.end_all(request, FinishReason.ERROR, error=problem, kind="invalid")
            elif grammar.ready():
                self._begin(request)
            else:
                still.append(request)
        self._compiling = still

    def abort(self, id: str, choice: int = -1) -> None:
        """End a request or one of its choices. Idempotent."""
        request = self.ledger.requests.get(id)
        if request is None:
            return
        if choice < 0 or request.open == {choice}:
            self.life.end_all(request, FinishReason.ABORT)
        elif request.beam is None:
            for seq in [seq for seq in request.sequences if seq.choice == choice]:
                self.life.end(seq, FinishReason.ABORT)
        elif choice in request.open:  # the search goes on for the other choices
            self.ledger.close(request, choice, self._clock(), FinishReason.ABORT)

    def fail(self, step: int, message: str) -> None:
        """A step raised. Its requests end; what it left in memory is trusted by nobody: the others recompute."""
        failed = {item.seq.request: None for item in self._flights.pop(step, ()) if item.seq.epoch == item.epoch}
        self._flights.clear()
        for request in failed:
            self.life.end_all(request, FinishReason.ERROR, error=message, kind="failed")
        for request in self.ledger.requests.values():
            for seq in request.sequences:
                self.life.forget_kv(seq)
        self._kv.drain()  # operations on memory that is given up
        self._kv.reset()

    def update(self, plan: Plan, result: Result) -> None:
        """What a submitted plan gave."""
        self._outcome.apply(self._flights.pop(plan.step), result.rows)

    # ---------------------------------------------------------------- the plan

    def schedule(self) -> Plan | None:
        """The next step, or None when nothing can be computed now."""
        now = self._clock()
        for request, which in self.ledger.expired(now):
            error = f"the {which} of the request has passed"
            self.life.end_all(request, FinishReason.ABORT, error=error, kind="deadline")
        if self._compiling:
            self._begin_compiled()
        self.guessing = False
        if self._proposer is not None:
            self._guess(self._proposer)
        budget, prefills = self._pick_decodes(self._settings.max_num_batched_tokens)
        budget = self._prefill_allowance(budget)
        budget = self._pick_prefills(prefills, budget)
        self._admit(prefills, budget)
        if not self._picked and not self._flights and self.life.running.sequences:
            self._unpark()
            self._admit([], budget)
        return self._plan(now) if self._picked else None

    def _pick_decodes(self, budget: int) -> tuple[int, list[Sequence]]:
        """Everyone who lacks one token gets it; returns what is left and who lacks more.

        One of the three loops over all sequences.
        """
        running, extend, picked = self.life.running.sequences, self._kv.extend, self._picked
        prefills: list[Sequence] = []
        i = 0
        while i < len(running):  # victims leave at the end of the list
            seq = running[i]
            i += 1
            known = len(seq.tokens) + seq.pending
            if seq.computed != known - 1:
                if seq.computed < known:
                    prefills.append(seq)
                continue  # a beam that waits for the others
            if seq.pending and (known >= seq.end or seq.lockstep):
                continue  # what comes next depends on the result
            if budget == 0:
                break
            if seq.drafts and not extend(seq.id, seq.computed, known + len(seq.drafts)):
                seq.drafts = ()  # room for guesses is taken only where it is free
            n = 1 + len(seq.drafts)
            if n > 1 or extend(seq.id, seq.computed, known) or self._make_room(seq, known):
                picked[seq] = n
                budget -= n
        return budget, prefills

    def _guess(self, proposer: Proposer) -> None:
        """Guesses of this step for those who lack one token, as many as pay and as the step has room for."""
        running = self.life.running.sequences
        room = self._settings.max_num_batched_tokens - len(running)
        asked: list[Sequence] = []
        asks: list[Ask] = []
        for seq in running:
            known = len(seq.tokens) + seq.pending
            limit = min(self._settings.num_drafts, seq.end - known - 1, room)
            if limit < 1 or seq.computed != known - 1 or not seq.samples or seq.request.beam is not None:
                continue
            if number := proposer.number(seq.id, seq.tokens, limit):
                asked.append(seq)
                asks.append(Ask(seq.id, seq.tokens, number, seq.request.salt, seq.slot_params))
                room -= number
        self.guessing = bool(asks)
        # With a result on its way nobody knows yet what the guesses follow; they are made when it has come.
        if not asks or self._flights:
            return
        began = time.perf_counter()
        for seq, guesses in zip(asked, proposer.propose(asks), strict=True):
            drafts = tuple(guesses)
            seq.drafts = drafts if seq.constraint is None else allowed_drafts(seq, drafts)
        self.guess_s += time.perf_counter() - began

    def _prefill_allowance(self, budget: int) -> int:
        """Prompt tokens of this step: those who decode wait for it, so it is bounded while there are any."""
        if not self._picked:
            return budget
        if self._settings.prefill_budget:
            budget = min(budget, self._settings.prefill_budget)
        if self._settings.stall_s:
            budget = min(budget, max(SMALLEST_CHUNK, int(self._settings.stall_s * self._costs.prefill_rate)))
        return budget

    def _pick_prefills(self, prefills: list[Sequence], budget: int) -> int:
        """Next chunks of prompts that have begun, the oldest first; returns what is left."""
        for seq in prefills:
            n = min(len(seq.tokens) - seq.computed, budget)
            if n == 0:
                break
            if seq.status is Status.RUNNING:  # not a victim of one before it
                total = seq.computed + n
                if self._kv.extend(seq.id, seq.computed, total) or self._make_room(seq, total):
                    self._picked[seq] = n
                    budget -= n
        return budget

    def _make_room(self, seq: Sequence, total: int) -> bool:
        """Preempt from the end of the order until `seq` can grow; False when it was itself the last.

        Alone it fits (`Request.end` sees to that) unless it still shares what it must copy, so it then begins anew.
        """
        running = self.life.running.sequences
        while True:
            victim = running[-1]
            self._preempt(victim, "no free block", anew=len(running) == 1)
            if victim is seq:
                return False
            if self._kv.extend(seq.id, seq.computed, total):
                return True

    def _preempt(self, seq: Sequence, why: str, *, anew: bool = False) -> None:
        self._picked.pop(seq, None)
        self.life.preempt(seq, why, anew=anew)

    def _unpark(self) -> None:
        """Only beams are left that wait for beams without room: they know what they need, so they give way."""
        for seq in [seq for seq in reversed(self.life.running.sequences) if seq.top is not None]:
            self._preempt(seq, "other beams need the room")

    def _admit(self, prefills: list[Sequence], budget: int) -> None:
        """Let waiting sequences in, in order, as long as their tokens fit beside what is promised to others."""
        kv, life, promised = self._kv, self.life, -1
        while budget > 0 and (seq := life.waiting.first()) is not None:
            if promised < 0:
                promised = sum(kv.missing(s.id, len(s.tokens)) for s in prefills if s.status is Status.RUNNING)
            spare = promised + self._headroom() if self._picked or self._flights else 0
            if not life.running.free_slots or not life.enter(seq, spare):
                last = life.running.last
                if last is None or last.request.add.priority <= seq.request.add.priority:
                    break
                self._preempt(last, "a more urgent request")
                continue
            life.waiting.pop()
            life.run(seq)
            n = min(len(seq.tokens) - seq.computed, budget)
            extended = kv.extend(seq.id, seq.computed, seq.computed + n)
            assert extended, "whoever is admitted has room"
            self._picked[seq] = n
            budget -= n
            promised += kv.missing(seq.id, len(seq.tokens))

    def _headroom(self) -> int:
        """Blocks that admission leaves, so that it doesn't cause preemption: the watermark, or what those who run

        will take in the next steps. Waived where nothing runs: there is nothing to preempt, and it must go on.
        """
        soon = len(self.life.running.sequences) * LOOKAHEAD
        return max(self._watermark, -(-soon // self._block_size))

    def _plan(self, now: float) -> Plan:
        """Rows of what was picked; from here on their tokens count as computed. One of the three loops."""
        rows: list[Row] = []
        items: list[Item] = []
        slots: list[tuple[int, SlotParams]] = []
        changes = self._kv.changes
        places = self.life.running.free_slots  # choices that can run at once; more would be many logits for nothing
        for seq, n in self._picked.items():
            table_start, table = changes(seq.id)
            if seq.resend:
                slots.append((seq.slot, seq.slot_params()))
                seq.resend = False
            followers = followers_of(seq, n)[:places]
            places -= len(followers)
            row = row_of(seq, n, table_start, table, followers, now)
            rows.append(row)
            start = seq.computed
            seq.computed = start + n
            seq.pending += row.sample
            items.append(Item(seq, seq.epoch, start, start + n, seq.drafts, followers))
            seq.drafts = ()
        self._picked.clear()
        self._step += 1
        self._flights[self._step] = items
        ops, disk_keys = self._kv.drain()
        return Plan(self._step, tuple(rows), ops, tuple(slots), disk_keys)
