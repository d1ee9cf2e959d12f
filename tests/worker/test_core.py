"""Random lives of the engine's core against its invariants.

Whatever is admitted, aborted, preempted, pulled, pushed, pinned, expired or crashed, in any order: the output is
that of the reference, nothing that the mover holds is overwritten, each request ends in one terminal message, and
no slot leaks.
"""

from __future__ import annotations

from typing import get_args

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from services.common.blocks import BLOCK_TOKENS, BlockId, chain_block_ids, split_ids
from services.worker.core import EngineCore
from services.worker.engine.batch import StepBuilder
from services.worker.engine_messages import BlockChanges, PushTarget
from services.worker.messages import (
    Abort,
    AdmittedRequest,
    HolderRun,
    KnownOutput,
    MoveRequested,
    PreparedRequest,
    RequestAborted,
    RequestFailed,
    Resume,
    StaleRequest,
    StepOutput,
)
from services.worker.mover_messages import (
    CancelPull,
    PinBlocks,
    PinnedSlots,
    PullBlocks,
    PullCut,
    PullDone,
    PushBlocks,
    PushDone,
    Unpin,
)
from services.worker.pushes import PushPolicy
from services.worker.sampler import draw_tokens
from tests.worker.cores import KEY, NUM_BLOCKS, ROOT, known_output, make_core, submit
from tests.worker.toy import VOCAB, ToyRunner, expected_tokens, prefix_entries

# Share of a choice's output that is known, and whether it has ended, by choice.
_known = st.one_of(
    st.just({}), st.dictionaries(st.integers(0, 2), st.tuples(st.floats(0, 1), st.sampled_from([False, False, True])))
)
_nodes = st.sampled_from(["", "node", "other"])


class CoreMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.sampled_from([9, 12, NUM_BLOCKS]),
        budget=st.sampled_from([16, 23, 200]),
        cache=st.booleans(),
        max_queue_s=st.sampled_from([0.1, 100.0]),
        push_policy=st.sampled_from(get_args(PushPolicy)),
        words=st.sampled_from([VOCAB, 3]),
        speculation_tokens=st.sampled_from([0, 6]),
    )
    def start(
        self,
        num_blocks: int,
        budget: int,
        cache: bool,
        max_queue_s: float,
        push_policy: PushPolicy,
        words: int,
        speculation_tokens: int,
    ) -> None:
        self.core = make_core(
            num_blocks,
            budget=budget,
            cache=cache,
            max_queue_s=max_queue_s,
            push_policy=push_policy,
            speculation_tokens=speculation_tokens,
        )
        self.runner = ToyRunner(num_blocks, words)
        self.words = words
        self.builder = StepBuilder()
        self.now = 0.0
        self.keys = 0
        self.prompts: dict[int, tuple[list[int], int, int]] = {}
        # By key and choice: tokens that another attempt has drawn, choices it has ended, and what is drawn here.
        self.known: dict[tuple[int, int], int] = {}
        self.ended: set[tuple[int, int]] = set()
        self.held: set[int] = set()
        self.prepared: set[int] = set()
        self.asked_to_move: set[int] = set()
        self.outputs: dict[tuple[int, int], list[int]] = {}
        self.terminal: dict[int, int] = {}
        self.aborted: set[int] = set()
        self.pulls: dict[int, PullBlocks] = {}
        # Pulls that were given up, and how many of their slots the engine has back.
        self.cut: dict[int, tuple[PullBlocks, int]] = {}
        self.pushes: dict[int, PushBlocks] = {}
        self.pins: dict[int, list[int]] = {}
        self.pinned_ids: dict[int, list[BlockId]] = {}
        self.texts: dict[BlockId, list[int]] = {}
        self.announced: set[BlockId] = set()

    @rule(
        shared=st.integers(0, 2),
        length=st.one_of(st.integers(1, 30), st.integers(1, 120)),
        tail=st.integers(0, 3),
        max_tokens=st.integers(1, 120),
        choices=st.sampled_from([1, 1, 1, 2, 3]),
        plan=st.booleans(),
        priority=st.integers(0, 3),
        deadline_s=st.sampled_from([1000.0, 1000.0, 3.0, 0.0]),
        known=_known,
        hold_s=st.sampled_from([0.0, 0.0, 3.0]),
    )
    def submit(
        self,
        shared: int,
        length: int,
        tail: int,
        max_tokens: int,
        choices: int,
        plan: bool,
        priority: int,
        deadline_s: float,
        known: dict[int, tuple[float, bool]],
        hold_s: float,
    ) -> None:
        self.keys += 1
        prompt = [(i * (shared + 3)) % VOCAB for i in range(length)] + [tail] * tail
        for index, block_id in enumerate(chain_block_ids(KEY, ROOT, prompt)):
            self.texts[block_id] = prompt[: (index + 1) * BLOCK_TOKENS]
        runs = [HolderRun("kvstore", "n", 1, "a", "b", 0, 3), HolderRun("worker", "w", 1, "a", "b", 3, 4)]
        self.prompts[self.keys] = (prompt, max_tokens, choices)
        self.held |= {self.keys} if hold_s else set()
        outputs = self._known_outputs(self.keys, known)
        self._handle(
            submit(
                self.keys,
                prompt,
                max_tokens,
                num_choices=choices,
                pull_plan=runs if plan else [],
                priority=priority,
                deadline_s=deadline_s,
                known=outputs,
                hold_s=hold_s,
            )
        )

    @rule(steps=st.integers(1, 40))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self._step()

    @rule()
    def crash_step(self) -> None:
        chunks = self.core.schedule(self.now)
        if chunks:
            self.core.fail_step(chunks, "crash")
        self._collect()

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.keys:
            key = data.draw(st.integers(1, self.keys))
            if key not in self.terminal:
                self.aborted.add(key)
                self.held.discard(key)
            request = self.core.scheduler.requests.get(key)
            self.core.handle(Abort(key), self.now)
            told = [message.usage for message in self.core.to_front if isinstance(message, RequestAborted)]
            assert [usage.key for usage in told] == ([key] if request is not None and request.prefilled else [])
            for usage in told:
                assert usage.prompt_tokens == len(self.prompts[key][0])
                assert usage.known_tokens == sum(self.known.get((key, c), 0) for c in range(16))
                drawn = usage.output_tokens - usage.known_tokens
                assert drawn == sum(len(self.outputs.get((key, c), [])) for c in range(16))
            self._collect()
            assert key not in self.core.scheduler.requests

    @rule(data=st.data(), further=_known, hold=st.booleans())
    def resume(self, data: st.DataObject, further: dict[int, tuple[float, bool]], hold: bool) -> None:
        if self.held:
            self._resume(data.draw(st.sampled_from(sorted(self.held))), further, hold=hold)

    @rule(data=st.data())
    def finish_pull(self, data: st.DataObject) -> None:
        if self.pulls:
            pull = self.pulls.pop(data.draw(st.sampled_from(sorted(self.pulls))))
            self._arrive(pull, data.draw(st.integers(0, len(pull.slots))))

    @rule(data=st.data())
    def cut_pull(self, data: st.DataObject) -> None:
        if self.pulls:
            pull = self.pulls.pop(data.draw(st.sampled_from(sorted(self.pulls))))
            count = data.draw(st.integers(0, len(pull.slots)))
            self._write(pull, count)
            self.cut[pull.key] = pull, count
            self._handle(PullCut(pull.key, count, ["ram"] * count, []))

    @rule(data=st.data())
    def finish_cut_pull(self, data: st.DataObject) -> None:
        if self.cut:
            pull, count = self.cut.pop(data.draw(st.sampled_from(sorted(self.cut))))
            self._handle(PullDone(pull.key, count, ["ram"] * count, "late"))

    @rule(data=st.data())
    def finish_push(self, data: st.DataObject) -> None:
        if self.pushes:
            push = self.pushes.pop(data.draw(st.sampled_from(sorted(self.pushes))))
            self._check_content(push.slots, split_ids(push.ids))
            accepted = data.draw(st.integers(0, len(push.slots)))
            self._handle(PushDone(push.key, accepted, data.draw(_nodes), 1, data.draw(st.booleans())))

    @rule(node=_nodes)
    def push_target(self, node: str) -> None:
        self._handle(PushTarget(node, 1, "a", "b"))

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        if self.texts:
            last = data.draw(st.sampled_from(sorted(self.texts)))
            ids = chain_block_ids(KEY, ROOT, self.texts[last])
            first = data.draw(st.integers(0, len(ids) - 1))
            self.keys += 1
            self.pinned_ids[self.keys] = ids[first:]
            self._handle(PinBlocks(self.keys, b"".join(ids[first:])))

    @rule()
    def unpin(self) -> None:
        if self.pins:
            key, slots = self.pins.popitem()
            self._check_content(slots, self.pinned_ids[key])
            self._handle(Unpin(key))

    @rule(seconds=st.sampled_from([0.5, 2.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.now += seconds
        self.core.expire(self.now)
        self._collect()

    @invariant()
    def is_consistent(self) -> None:
        if not hasattr(self, "core"):
            return
        self.core.pool.check()
        held = {slot for slot, block_id in enumerate(self._ids()) if block_id is not None}
        assert self.announced == {self._ids()[slot] for slot in held}

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for _ in range(3000):
            if self.core.is_idle:
                break
            for pull in list(self.pulls.values()):
                self._arrive(self.pulls.pop(pull.key), len(pull.slots))
            for key in list(self.cut):
                self._handle(PullDone(self.cut.pop(key)[0].key, 0, [], "late"))
            for push in list(self.pushes):
                self._handle(PushDone(self.pushes.pop(push).key, 0))
            for key in list(self.pins):
                self.pins.pop(key)
                self._handle(Unpin(key))
            for key in [key for key in self.held if key % 2]:
                self._resume(key, {})
            if not self._step():
                # Those that are held in vain end by themselves.
                self.let_time_pass(1.0)
        assert self.core.is_idle, "work does not end"
        self.core.pool.check()
        assert self.core.pool.statistics.referenced == 0
        for key, (prompt, max_tokens, choices) in self.prompts.items():
            assert self.terminal.get(key, 0) == (key not in self.aborted), key
            for choice in range(choices):
                output = self.outputs.get((key, choice), [])
                known = self.known.get((key, choice), 0)
                assert not output or (key, choice) not in self.ended
                assert output == expected_tokens(tuple(prompt), max_tokens, self.words)[known : known + len(output)]

    def _ids(self) -> list[BlockId | None]:
        return [self.core.pool.id_of(slot) for slot in range(self.core.pool.num_blocks)]

    def _handle(self, message: object) -> None:
        self.core.handle(message, self.now)  # type: ignore[arg-type]
        self._collect()

    def _known_outputs(self, key: int, known: dict[int, tuple[float, bool]]) -> list[KnownOutput]:
        """What another attempt has drawn of the choices after what is known of them."""
        prompt, max_tokens, choices = self.prompts[key]
        expected, outputs = expected_tokens(tuple(prompt), max_tokens, self.words), []
        for choice, (share, finished) in known.items():
            if choice >= choices or (key, choice) in self.ended:
                continue
            before = self.known.get((key, choice), 0)
            count = before + int(share * (max_tokens - 1 - before)) + finished
            self.known[key, choice] = count
            self.ended |= {(key, choice)} if finished else set()
            outputs.append(known_output(choice, expected[before:count], finished=finished))
            for index, block_id in enumerate(chain_block_ids(KEY, ROOT, prompt + expected[:count])):
                self.texts[block_id] = (prompt + expected[:count])[: (index + 1) * BLOCK_TOKENS]
        return outputs

    def _resume(self, key: int, further: dict[int, tuple[float, bool]], *, hold: bool = False) -> None:
        (self.prepared if hold else self.held).discard(key)
        self._handle(Resume(key, self._known_outputs(key, further), hold))

    def _step(self) -> bool:
        self.now += 0.01
        chunks = self.core.schedule(self.now)
        self._collect()
        if not chunks:
            return False
        assert not any(chunk.draws and chunk.sequence.request.key in self.held for chunk in chunks)
        for chunk in chunks:
            tokens = chunk.sequence.tokens[: chunk.sequence.num_tokens].tolist()
            for index, block_id in enumerate(chain_block_ids(KEY, ROOT, tokens)):
                self.texts[block_id] = tokens[: (index + 1) * BLOCK_TOKENS]
        written = {
            chunk.sequence.slots[p // 16] for chunk in chunks for p in range(chunk.start, chunk.start + chunk.length)
        }
        busy = [*self.pins.values(), *(p.slots for p in self.pulls.values()), *(p.slots for p in self.pushes.values())]
        busy += [pull.slots[count:] for pull, count in self.cut.values()]
        assert not written & {slot for slots in busy for slot in slots}
        self.runner.submit(self.builder.build(chunks))
        draws = draw_tokens(self.runner.collect(), EngineCore.draw_rows(chunks))
        self.core.commit(chunks, draws, 0.01, self.now)
        self._collect()
        return True

    def _arrive(self, pull: PullBlocks, count: int) -> None:
        self._write(pull, count)
        self._handle(PullDone(pull.key, count, ["ram"] * count, ""))

    def _write(self, pull: PullBlocks, count: int) -> None:
        for slot, block_id in list(zip(pull.slots, split_ids(pull.ids), strict=True))[:count]:
            self.runner.kv[slot] = prefix_entries(self.texts[block_id])[-BLOCK_TOKENS:]

    def _check_content(self, slots: list[int], ids: list[BlockId]) -> None:
        for slot, block_id in zip(slots, ids, strict=False):
            assert self.runner.kv[slot].tolist() == prefix_entries(self.texts[block_id])[-BLOCK_TOKENS:]

    def _collect(self) -> None:
        for message in self.core.to_front:
            match message:
                case RequestFailed(key=key) | StaleRequest(key=key):
                    self.terminal[key] = self.terminal.get(key, 0) + 1
                    self.held.discard(key)
                case PreparedRequest(key=key):
                    assert key in self.held - self.prepared
                    self.prepared.add(key)
                    for sequence in self.core.scheduler.requests[key].sequences:
                        if (key, sequence.choice) not in self.ended:
                            assert sequence.num_computed == sequence.num_tokens - 1
                            assert len(sequence.slots) * BLOCK_TOKENS >= sequence.num_tokens
                case MoveRequested(key=key):
                    assert key not in self.asked_to_move | self.held
                    self.asked_to_move.add(key)
                case AdmittedRequest(key=key):
                    assert key not in self.terminal
                case StepOutput(choices=choices, completed=completed):
                    for output in choices:
                        assert output.key not in self.terminal
                        assert output.key not in self.aborted
                        self.outputs.setdefault((output.key, output.choice), []).extend(output.token_ids)
                    for usage in completed:
                        self.held.discard(usage.key)
                        self.terminal[usage.key] = self.terminal.get(usage.key, 0) + 1
                        prompt, max_tokens, choices_wanted = self.prompts[usage.key]
                        ended = [c for c in range(choices_wanted) if (usage.key, c) in self.ended]
                        known = sum(self.known.get((usage.key, c), 0) for c in ended)
                        assert usage.output_tokens == max_tokens * (choices_wanted - len(ended)) + known
                        assert usage.known_tokens == sum(
                            self.known.get((usage.key, c), 0) for c in range(choices_wanted)
                        )
                        assert usage.prompt_tokens == len(prompt)
                        assert usage.cached_local + usage.cached_ram < len(prompt) + bool(usage.known_tokens)
                case BlockChanges(adds=adds, removes=removes):
                    self.announced -= set(split_ids(removes))
                    self.announced |= set(split_ids(adds))
        for message in self.core.to_mover:
            match message:
                case PullBlocks():
                    self.pulls[message.key] = message
                case PushBlocks():
                    self.pushes[message.key] = message
                case PinnedSlots(key=key, slots=slots) if slots:
                    self.pins[key] = slots
                case CancelPull(key=key):
                    assert key in self.pulls
        self.core.to_front.clear()
        self.core.to_mover.clear()


TestCore = CoreMachine.TestCase
TestCore.settings = settings(max_examples=60, stateful_step_count=40)
