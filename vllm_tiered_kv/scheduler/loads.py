# SPDX-License-Identifier: Apache-2.0
"""What is offered to a request, and what becomes of it once vLLM has taken it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_tiered_kv import metrics
from vllm_tiered_kv.gate import GateMode
from vllm_tiered_kv.protocol import JobStatus, LoadJob, PullJob
from vllm_tiered_kv.scheduler.adapters import BASE_MODEL, MAX_ADAPTERS, Verdict
from vllm_tiered_kv.scheduler.core import TIER, Core
from vllm_tiered_kv.scheduler.disk import TIER as DISK
from vllm_tiered_kv.scheduler.disk_lookups import DiskLookups
from vllm_tiered_kv.scheduler.gating import RequestGate
from vllm_tiered_kv.scheduler.groups import last_of, usable_ends
from vllm_tiered_kv.scheduler.jobs import ActiveLoad
from vllm_tiered_kv.scheduler.peer_lookups import PeerLookups
from vllm_tiered_kv.scheduler.plan import chunk_key, chunk_keys, count_chunks, plan_load
from vllm_tiered_kv.scheduler.requests import Offer, RequestState
from vllm_tiered_kv.scheduler.room import Room
from vllm_tiered_kv.scheduler.slow import Lookups

if TYPE_CHECKING:
    from vllm_tiered_kv.compat import KVCacheBlocks, KVConnectorOutput
    from vllm_tiered_kv.scheduler.index import Node
    from vllm_tiered_kv.scheduler.peers import PeerTier
    from vllm_tiered_kv.scheduler.pulls import Pulls

MAX_LOADS = 64
"""Loads under way at once; each holds device blocks from its first byte to its last."""
STORE_PATIENCE = 0.5
"""Seconds a look-up waits at most for a chunk that is on its way into the tier; it takes
milliseconds, but on a machine whose processors are all busy."""
ADAPTER_PATIENCE = 0.5
"""Seconds the first look-up with a LoRA adapter waits at most for the digest of its weights."""
MAX_FAILED_LOADS = 1
"""A request whose loads failed so often is computed: it must come to an end."""


class LoadPlanner:
    """Look-ups and loads."""

    def __init__(
        self,
        core: Core,
        gate: RequestGate,
        pulls: Pulls | None = None,
        peers: PeerTier | None = None,
    ) -> None:
        self._core = core
        self._gate = gate
        self._pulls = pulls
        self._sources: list[Lookups] = [DiskLookups(core, gate, self._wait)]
        """What is read into the CPU tier for look-ups, in the order that they are asked."""
        if peers is not None:
            gate.bind_peers(peers)
            self._sources.append(PeerLookups(core, gate, peers, self.may_wait))
        self._loading: dict[bytes, str] = {}  # chunk key -> the request that loads it
        self.lost: set[str] = set()
        """Requests whose load was lost, ours or another connector's, and that vLLM has not admitted
        again: it still reserves blocks for that load, and admits no load that would need them."""
        settings = core.settings
        self.room = Room(settings.geometry, settings.step_tokens, settings.draft_tokens)
        """What requests hold that cannot run yet."""
        self.jobs: list[LoadJob] = []
        """For the next plan."""
        self.cancels: list[int] = []
        """For the next plan."""
        self.refail: list[str] = []
        """For the next plan."""

    def find(self, state: RequestState, computed: int) -> int | None:
        """Tokens that can be loaded beyond the first ``computed``; None: ask again later."""
        # The last offer did not fit: what a lost load reserves may never be given back before this
        # request is out of the way. It is computed, for which vLLM needs no more than free blocks.
        offered = state.offer is not None or state.pull is not None
        refused = offered and bool(self.lost)
        tokens = self._find(state, computed, refused=refused)
        if tokens is None or state.handoff is None or self._pulls is None:
            return tokens
        if refused or not self._may_load(state) or state.is_crowded:
            self._pulls.drop(state)
            return tokens
        return self._with_pull(self._pulls, state, computed, tokens)

    def _with_pull(
        self, pulls: Pulls, state: RequestState, computed: int, tokens: int
    ) -> int | None:
        """Offer what another engine hands over beyond what the tiers have."""
        found = pulls.beyond(state, computed, tokens)
        if found is not None and found[0] >= found[1]:
            return tokens
        if found is None or len(self._core.ledger.loads) >= MAX_LOADS:
            if self._wait(state, pulls.patience(state)):
                return None
            pulls.drop(state)
            return tokens
        if self._awaits_room(state):
            return None
        if state.is_crowded:
            pulls.drop(state)
            return tokens
        state.ruling = None  # the gate is not asked about this
        state.pull = found
        return found[1] - computed

    def _may_load(self, state: RequestState) -> bool:
        may = state.params.load and state.failed_loads < MAX_FAILED_LOADS
        return may and not state.request.skip_reading_prefix_cache

    def _find(self, state: RequestState, computed: int, *, refused: bool) -> int | None:
        """What the tiers have."""
        core, request = self._core, state.request
        if state.load is not None:
            return 0
        self.room.gives(request.request_id)  # its blocks have been given back
        if state.is_crowded and self._awaits_room(state):
            return None
        if self._awaits_adapter(state, computed):
            return None
        state.restart(core.epoch, core.geometry.chunk_tokens)
        if not state.is_reading and not state.failed_loads:
            state.ruling = None
        content = state.content
        allowed = self._may_load(state) and self._gate.mode(state) is not GateMode.NEVER
        if content is None or not allowed or refused:
            return self._answer(state, "skipped", 0)
        # A load may cover the whole prompt: vLLM then computes the last token again. The
        # window of that token begins one earlier than the blocks vLLM allocates for it, and
        # a state that has seen the token must not see it twice.
        reusable = request.num_tokens - (0 if core.geometry.keeps_all else 1)
        first = computed // core.geometry.chunk_tokens
        if first >= count_chunks(request.block_hashes, reusable, core.geometry):
            return self._answer(state, "miss", 0)
        key = chunk_key(request.block_hashes, first, core.geometry, content.digest)
        if self._awaits_load(state, key, computed) or self._awaits_store(state, computed):
            return None  # asked again in every step, for every request that waits: stay cheap
        if any(source.waits(state, computed) for source in self._sources):
            return None
        keys = chunk_keys(request.block_hashes, reusable, core.geometry, content.digest)
        run = core.index.ready_run(keys, first)
        ends = usable_ends(core.geometry, run, first, computed)
        usable = last_of(ends)
        sources = reversed(self._sources) if self._gate.prefers_peers() else self._sources
        if any(source.begins(state, keys, first, computed, ends) for source in sources):
            return None
        end = first + len(run)
        beyond = core.index.get(keys[end]) if end < len(keys) else None
        state.awaited = beyond or next((node for node in run[usable:] if node.coming), None)
        if self._awaits_store(state, computed):
            return None
        if not usable:
            refused = state.ruling is not None and not state.is_reading
            return self._answer(state, "refused" if refused else "miss", 0)
        worth = self._gate.copy_to(state, first, computed, ends)
        if not worth:
            return self._answer(state, "refused", 0)
        if self._awaits_room(state):
            return None
        if state.is_crowded:
            state.ruling = None
            return self._answer(state, "skipped", 0)
        state.offer = Offer(computed, first, tuple(run[:worth]))
        return self._answer(state, "hit", state.offer.tokens(core.geometry.chunk_tokens))

    def allocated(self, state: RequestState, blocks: KVCacheBlocks, tokens: int) -> None:
        """vLLM admits the request and takes ``tokens`` of what was offered."""
        self._gate.admitted(state, tokens)
        offer, state.offer = state.offer, None
        pull, state.pull = state.pull, None
        state.counted = False
        state.waiting_since = None
        state.awaited = None
        state.look = None
        state.is_crowded = False
        self.lost.discard(state.request.request_id)
        try:
            self._begin(state, offer, pull, blocks, tokens)
        finally:
            self.forget_fetch(state)
            self.forget_handoff(state)

    def forget_handoff(self, state: RequestState) -> None:
        """What another engine hands over to a request is not wanted, or not any more."""
        if self._pulls is not None:
            self._pulls.drop(state)

    def forget_fetch(self, state: RequestState) -> None:
        """What was read for a request's look-up is nobody's in particular any more."""
        for source in self._sources:
            source.forget(state)

    def _begin(
        self,
        state: RequestState,
        offer: Offer | None,
        pull: tuple[int, int] | None,
        blocks: KVCacheBlocks,
        tokens: int,
    ) -> None:
        core = self._core
        if tokens <= 0 or state.load is not None:
            return
        load = None
        pulled = 0
        tables = blocks.get_block_ids()
        try:
            had = offer.tokens(core.geometry.chunk_tokens) if offer is not None else 0
            pulled = max(0, tokens - had) if pull is not None else 0
            if offer is not None:
                load = self._plan(state, offer, tables, tokens - pulled)
            elif pulled:
                load = ActiveLoad(state.request.request_id, (), (), (), 0)
        except Exception:  # noqa: BLE001 - vLLM waits for this load now: it must end
            core.bug("planning a load")
        if load is None:
            # One without copies ends as failed, and the request is computed.
            core.fail("load_plan", "a promised prefix could not be planned; recomputing it")
            load, pulled = ActiveLoad(state.request.request_id, (), (), (), 0), 0
        elif offer is not None:
            _note_sources(load, state, offer, core.geometry.chunk_tokens)
        for node in load.nodes:
            core.index.pin(node)
            self._loading.setdefault(node.key, load.request_id)
        state.load = load
        tokens_in_all = state.request.num_tokens
        self.room.takes(load.request_id, tokens_in_all, tables, core.null_block)
        job = core.ledger.add_load(load)
        self._gate.queued(load)
        copies, pull_job = load.copies, None
        if pulled and pull is not None:
            pull_job = self._plan_pull(state, load, pull[0], pulled, tables)
            copies = copies if pull_job is not None else ()  # ends as failed
        deadline = self._gate.deadline(state)
        use = (state.content or BASE_MODEL).use
        worth = self._gate.worth(state)
        self.jobs.append(LoadJob(job, load.request_id, copies, deadline, use, pull_job, worth))

    def _plan_pull(
        self,
        state: RequestState,
        load: ActiveLoad,
        start: int,
        tokens: int,
        tables: Sequence[Sequence[int]],
    ) -> PullJob | None:
        planned = None
        try:
            if self._pulls is not None:
                planned = self._pulls.plan(load.job, state, start, start + tokens, tables)
        except Exception:  # noqa: BLE001 - vLLM waits for this load now: it must end
            self._core.bug("planning a pull")
        if planned is None:
            self._core.fail("load_plan", "a promised hand-over could not be planned; recomputing")
            return None
        job, load.pull = planned
        return job

    def settled(self, load: ActiveLoad) -> None:
        """Every rank is done with the slots and, but for a pull given up, the blocks."""
        core, pull = self._core, load.pull
        is_done = load.status is JobStatus.DONE
        if is_done and pull is not None and not pull.is_good(core.clock()):
            core.fail("remote_lease", "a hand-over arrived after its lease was over")
            load.stale = True
        core.count_copy("load", load.nbytes, load.seconds if load.nbytes else 0.0)
        self._gate.copied(load)
        if load.status is JobStatus.DONE and not load.stale:
            elsewhere = load.from_disk + load.from_peers
            core.tally.add(metrics.HIT_TOKENS.key(TIER), load.tokens - elsewhere)
            if load.from_disk:
                core.tally.add(metrics.HIT_TOKENS.key(DISK), load.from_disk)
            if load.from_peers:
                core.tally.add(metrics.HIT_TOKENS.key(metrics.PEER_CPU), load.from_peers)
            core.count_chunks("loaded", len(load.nodes))
        else:
            # A load that was called off says nothing about its chunks.
            failed = load.failed if load.status is JobStatus.FAILED else ()
            bad = {load.sources[i] for i in failed}
            for source in bad:
                core.index.discard(load.nodes[source])
            core.count_chunks("failed", len(bad))
            core.fail(
                "load_stale" if load.stale else f"load_{load.status.value}",
                "a load did not arrive; the request is recomputed",
            )
        for node in load.nodes:
            core.index.unpin(node)

    def told(self, state: RequestState, output: KVConnectorOutput) -> None:
        """The ranks say that the request's load is over; vLLM reads it after this call."""
        load, request_id = state.load, state.request.request_id
        if load is None:
            return
        if load.stale and request_id not in output.failed_recving:
            # Its bytes are from before a reset, and vLLM would enter them in its prefix
            # cache: hold the good news back and have it reported again, as a failure.
            output.finished_recving.discard(request_id)
            self.refail.append(request_id)
            return
        state.load = None
        if load.pull is not None and self._pulls is not None:
            good = load.status is JobStatus.DONE and not load.stale
            self._pulls.told(load.job, good=good)
        for node in load.nodes:
            if self._loading.get(node.key) == request_id:
                del self._loading[node.key]
        if load.stale or load.status is not JobStatus.DONE:
            # Which of its blocks hold good bytes is known when vLLM schedules it again.
            state.restart(self._core.epoch, self._core.geometry.chunk_tokens)
            state.failed_loads += 1
            self._gate.lost(state, load)
        else:
            state.loaded_from = _furthest(load)
            self._gate.arrived(state, load)

    def reset(self) -> None:
        """Loads under way must end as failed."""
        for job, load in self._core.ledger.loads.items():
            if not load.stale:
                load.stale = True
                self.cancels.append(job)

    def _awaits_adapter(self, state: RequestState, computed: int) -> bool:
        """Settle what the request's KV stands for; whether to ask again for it later."""
        if state.lora is None:
            return False
        adapters = self._core.adapters
        found = adapters.look(state.lora, computed)
        if found is Verdict.ASK_AGAIN and self._wait(state, ADAPTER_PATIENCE):
            return True
        state.content = None if isinstance(found, Verdict) else found
        if found is Verdict.NEVER:
            self._core.fail(
                "adapter",
                f"LoRA adapter {state.lora.name!r} was loaded in place, or its name and path may "
                "have stood for other weights before: requests with it may be computed without the "
                "tier. Load new weights from a new path",
            )
        elif found is Verdict.NO_ROOM:
            self._core.fail(
                "adapter_limit",
                f"more than {MAX_ADAPTERS} LoRA adapters are loaded at once: requests with any "
                "others are computed without the tier",
            )
        elif state.content is None:
            adapters.went_without(state.lora)
        return False

    def _awaits_store(self, state: RequestState, computed: int) -> bool:
        """Whether to ask again later: a chunk or a part of it is on its way into the tier.

        Its copy ends within moments, and then it can be loaded.
        """
        node = state.awaited
        if node is None or not node.is_arriving or self._gate.is_probing(node):
            return False
        return self._wait(state, self._gate.worth_waiting(state, computed, STORE_PATIENCE))

    def _awaits_load(self, state: RequestState, key: bytes, computed: int) -> bool:
        """Whether to ask again later: another request is loading this very prefix."""
        core = self._core
        owner = self._loading.get(key) if core.settings.shares_device_prefixes else None
        shared = owner is not None and owner != state.request.request_id
        if not shared and len(core.ledger.loads) < MAX_LOADS:
            return False
        most = core.settings.load_deadline
        return self._wait(state, self._gate.worth_waiting(state, computed, most))

    def _awaits_room(self, state: RequestState) -> bool:
        """Whether to ask again later: with one more load none might ever get what it needs."""
        state.is_crowded = not self.room.admits(state.request.num_tokens)
        return state.is_crowded and self.may_wait(state)

    def may_wait(self, state: RequestState) -> bool:
        """Whether the request may be asked to come back once more."""
        return self._wait(state, self._core.settings.load_deadline)

    def _wait(self, state: RequestState, patience: float) -> bool:
        """Whether the request has not yet waited for ``patience`` seconds."""
        core = self._core
        now = core.clock()
        if state.waiting_since is None:
            state.waiting_since = now
            core.tally.add(metrics.LOOKUPS.key("wait"))
        return now - state.waiting_since < patience

    def _answer(self, state: RequestState, result: str, tokens: int) -> int:
        if not state.counted:
            state.counted = True
            self._core.tally.add(metrics.LOOKUPS.key(result))
        return tokens

    def _plan(
        self, state: RequestState, offer: Offer, tables: Sequence[Sequence[int]], tokens: int
    ) -> ActiveLoad | None:
        core = self._core
        plan = plan_load(core.geometry, offer, tokens, tables, core.null_block)
        if plan is None:
            return None
        self._use(state, offer)
        used = sorted(set(plan.sources))
        place = {source: i for i, source in enumerate(used)}
        nodes = tuple(offer.nodes[source] for source in used)
        sources = tuple(place[source] for source in plan.sources)
        return ActiveLoad(state.request.request_id, nodes, plan.copies, sources, tokens)

    def _use(self, state: RequestState, offer: Offer) -> None:
        """Note that the whole prefix is used, also what the device holds already: once each."""
        geometry, index, disk = self._core.geometry, self._core.index, self._core.disk
        tokens = offer.first * geometry.chunk_tokens
        digest = (state.content or BASE_MODEL).digest
        keys = chunk_keys(state.request.block_hashes, tokens, geometry, digest)
        prefix = [(i, node) for i, key in enumerate(keys) if (node := index.get(key)) is not None]
        prefix += enumerate(offer.nodes, offer.first)
        known = [node for i, node in prefix if i < state.used]
        fresh = [node for i, node in prefix if i >= state.used]
        added = {node for fetch in state.fetches for node in fetch.added}
        index.touch(
            [node for node in fresh if node not in added],
            again=[*known, *(node for node in fresh if node in added)],
        )
        if disk is not None:
            disk.used([node.key for node in fresh], again=[node.key for node in known])
        state.used = max(state.used, offer.first + len(offer.nodes))


def _note_sources(load: ActiveLoad, state: RequestState, offer: Offer, size: int) -> None:
    """How much of a load was read from elsewhere into the CPU tier, for this very request."""
    from_peers: set[Node] = set()
    if state.peers is not None and state.peers.fetch is not None:
        from_peers = state.peers.fetch.read
        load.from_peers = offer.tokens_of(from_peers, load.tokens, size)
    if state.fetch is not None:
        load.from_disk = offer.tokens_of(state.fetch.read - from_peers, load.tokens, size)


def _furthest(load: ActiveLoad) -> str:
    """Where the part of a load came from that was furthest away."""
    if load.pull is not None:
        return metrics.PEER
    if load.from_peers:
        return metrics.PEER_CPU
    return DISK if load.from_disk else TIER
