# SPDX-License-Identifier: Apache-2.0
"""The scheduler half of the connector: vLLM's hooks, in the order it calls them.

Everything runs on vLLM's scheduler thread and returns at once. What a hook decides waits
until :meth:`SchedulerHalf.build_plan` sends it to the ranks with the next step.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm_tiered_kv import compat, metrics
from vllm_tiered_kv.channel import SchedulerEndpoint
from vllm_tiered_kv.params import DEFAULT, ParamsError, parse_params
from vllm_tiered_kv.protocol import Direction, Setup, StepPlan, WorkerReport
from vllm_tiered_kv.scheduler.adapters import LoraName
from vllm_tiered_kv.scheduler.core import TIER, Core, SchedulerSettings
from vllm_tiered_kv.scheduler.disk import Since
from vllm_tiered_kv.scheduler.first_tokens import FirstTokens
from vllm_tiered_kv.scheduler.gating import RequestGate
from vllm_tiered_kv.scheduler.loads import LoadPlanner
from vllm_tiered_kv.scheduler.remote import HANDED_WITHOUT_REMOTE, RemoteParts, RemotePlanner
from vllm_tiered_kv.scheduler.requests import NEVER, RequestState
from vllm_tiered_kv.scheduler.states import NO_STATES, States, found_states, kept_states
from vllm_tiered_kv.scheduler.stores import StorePlanner

if TYPE_CHECKING:
    from vllm_tiered_kv.compat import (
        BlockPool,
        KVCacheBlocks,
        KVConnectorOutput,
        Request,
        SchedulerOutput,
    )
    from vllm_tiered_kv.scheduler.handing import Handed
    from vllm_tiered_kv.tiers.disk.agent import DiskAgent


class SchedulerHalf:
    """Plans stores and loads.

    Args:
        settings: the parsed configuration and the model's cut.
        endpoint: the side channel, or None where there is none.
        clock: seconds, monotonic.
        on_shutdown: what else ends with this half.
        agent: runs the disk tier; None without one.
        remote: what hands KV over to other engines and takes it; None without.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        endpoint: SchedulerEndpoint | None,
        clock: Callable[[], float] = time.monotonic,
        on_shutdown: Callable[[], None] | None = None,
        agent: DiskAgent | None = None,
        remote: RemoteParts | None = None,
    ) -> None:
        self._on_shutdown = on_shutdown
        self.core = Core(settings, clock, agent)
        self.gate = RequestGate(self.core)
        self.stores = StorePlanner(self.core, self._drain_once)
        self.remote = RemotePlanner(self.core, self.stores, remote) if remote is not None else None
        """Hand-overs between engines; None without."""
        pulls = self.remote.pulls if self.remote is not None else None
        peers = self.remote.peers if self.remote is not None else None
        self.loads = LoadPlanner(self.core, self.gate, pulls, peers)
        self.first_tokens = FirstTokens(self.core)
        self._endpoint = endpoint
        self._setup = Setup(
            endpoint.address if endpoint else "",
            endpoint.secret if endpoint else b"",
            settings.num_slots,
            settings.geometry.chunk_tokens,
            *(agent.addresses if agent is not None else ("", "", b"")),
            self.remote.setup if self.remote is not None else None,
        )
        self._requests: dict[str, RequestState] = {}
        self._parked: set[str] = set()
        """Requests whose load is over, ours or another connector's, and that vLLM has not gone on
        with: they hold device blocks."""
        self._gauges: dict[str, float] = {}
        self._evicted = 0
        self._malformed = 0
        self._drained = False
        self._pool: BlockPool | None = None
        self._device_cache: object = None

    @property
    def delivers(self) -> bool:
        """Whether this engine hands KV over to others."""
        return self.remote is not None and self.remote.agent.settings.sends

    # -- start and end ----------------------------------------------------------

    def bind_block_pool(self, pool: BlockPool) -> None:
        """Take the engine's block pool.

        Raises:
            UnsupportedModel: another one of us has it.
        """
        if pool is not self._pool:
            compat.claim(pool)
        self.core.null_block = compat.null_block_id(pool)
        self.stores.bind(pool)
        self.loads.room.bind(compat.usable_blocks(pool))
        if self.remote is not None:
            self.remote.bind(pool)
        self._pool = pool
        self._device_cache = compat.device_cache(pool)

    def shutdown(self) -> None:
        if self.core.disk is not None:
            self.core.disk.agent.shutdown()
            self.core.disk = None
        if self.remote is not None:
            self.remote.shutdown()
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None
        if self._on_shutdown is not None:
            self._on_shutdown()
            self._on_shutdown = None

    # -- look-up and load ---------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        self._state(request)

    def find(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond ``computed``, and that it is asynchronous.

        None instead of a number: ask again.
        """
        try:
            self._drain_once()
            self._notice_device_reset()  # before anything is computed that follows it
            state = self._state(request)
            if self._gives_way(state):
                return None, False
            tokens = self.loads.find(state, computed)
        except Exception:  # noqa: BLE001
            self.core.bug("a look-up")
            return 0, False
        return tokens, bool(tokens)

    def _gives_way(self, state: RequestState) -> bool:
        """Whether a request whose load was lost lets others pass.

        vLLM keeps it at the head of those that hold blocks, and looks at none behind a request
        that doesn't fit: on a small device the blocks it needs may be theirs, and then nothing
        would ever move again. Asked to come back, it is passed over.
        """
        request_id = state.request.request_id
        if request_id in self._parked:  # looked up again: its blocks have been given back
            self._parked.discard(request_id)
            self.loads.lost.add(request_id)
        lost = request_id in self.loads.lost
        return lost and bool(self._parked) and self.loads.may_wait(state)

    def allocated(self, request: Request, blocks: KVCacheBlocks, tokens: int) -> None:
        """vLLM admits the request and takes ``tokens`` of what was offered."""
        self.loads.allocated(self._state(request), blocks, tokens)

    def sources(self, request: Request, tokens: int) -> tuple[int, int]:
        """How many of the tokens that were taken for a request come from disk, and from peers."""
        state = self._requests.get(request.request_id)
        if state is None or state.load is None:
            return 0, 0
        load = state.load
        pulled = min(tokens, load.pull.tokens if load.pull is not None else 0)
        disk = min(tokens - pulled, load.from_disk)
        return disk, pulled + min(tokens - pulled - disk, load.from_peers)

    # -- every step -----------------------------------------------------------------

    def build_plan(self, output: SchedulerOutput) -> StepPlan:
        """What the ranks have to do with this step."""
        self._drain_once()
        self._drained = False
        self._notice_device_reset()
        requests = self._requests
        for request_id, scheduled in output.num_scheduled_tokens.items():
            state = requests.get(request_id)
            if state is None:
                continue
            first, state.unsure = state.unsure, False
            if first:
                self._parked.discard(request_id)
                self.loads.room.gives(request_id)
                self.first_tokens.begins(state)
            computed = state.planned = state.request.num_computed_tokens + scheduled
            if state.awaits_token and computed >= state.request.num_tokens:
                self.first_tokens.planned(state)
            tables = functools.partial(_block_tables, output, request_id)
            if computed >= state.next_store_at:
                try:
                    states = self._states(state, output, tables, first=first)
                    self.stores.computed(state, computed, tables, states)
                except Exception:  # noqa: BLE001
                    state.next_store_at = NEVER
                    self.core.bug("planning a store")
            if self.remote is not None:
                self.remote.planned(state, computed, tables)
        if self.core.settings.withdraws:
            self._uncache_withdrawn(output)
        if self.remote is not None:
            self.remote.preempted([r for i in compat.preempted(output) if (r := requests.get(i))])
        loads, stores = self.loads, self.stores
        self.gate.planned(output.num_scheduled_tokens, requests, loads=bool(loads.jobs))
        plan = StepPlan(
            self._setup,
            tuple(loads.jobs),
            tuple(stores.jobs),
            tuple(stores.fences),
            tuple(loads.cancels),
            tuple(loads.refail),
            not output.num_scheduled_tokens,
            tuple(self.core.adapters.watch),
            tuple(self.core.adapters.unwatch),
            *(self.remote.take_news() if self.remote is not None else ()),
        )
        for sent in (loads.jobs, stores.jobs, stores.fences, loads.cancels, loads.refail):
            sent.clear()
        self.core.adapters.watch.clear()
        self.core.adapters.unwatch.clear()
        return plan

    def step_ended(self) -> None:
        """vLLM has taken in the output of the oldest step that was planned."""
        self.gate.ended()
        self.first_tokens.step_ended()

    def _uncache_withdrawn(self, output: SchedulerOutput) -> None:
        """Take out of the device's prefix cache what requests were to compute in this step.

        vLLM enters blocks there when it plans to fill them. If it then takes the request out of
        the step, for one with a higher priority, it leaves them there (vllm-project/vllm#57580),
        and who found them would read what was never written; and the tier would keep what comes
        of it. Nobody can have found them yet: vLLM admits no request in such a step.
        """
        for request_id in compat.preempted(output):
            state = self._requests.get(request_id)
            if state is None or self._pool is None or request_id in output.num_scheduled_tokens:
                continue
            geometry = self.core.geometry
            try:
                hashes = state.uncomputed(geometry.hash_tokens)
                compat.uncache_blocks(self._pool, hashes, geometry.group_ids)
            except Exception:  # noqa: BLE001
                self.core.bug("taking blocks out of the device's cache")

    def _states(
        self,
        state: RequestState,
        output: SchedulerOutput,
        block_ids: Callable[[], Sequence[Sequence[int]]],
        *,
        first: bool,
    ) -> States:
        """The recurrent states of a request that can be stored after this step."""
        core = self.core
        if not core.geometry.has_states:
            return NO_STATES
        states: dict[int, Mapping[int, int]] = {}
        if first and (tables := block_ids()):
            found = state.request.num_computed_tokens
            states.update(found_states(core.geometry, found, tables, core.null_block))
        handed_over = compat.handed_over_states(output, state.request.request_id)
        states.update(kept_states(core.geometry, handed_over))
        return states

    def update(self, output: KVConnectorOutput, reports: Sequence[WorkerReport]) -> None:
        """Take in what the ranks sent with a step's output."""
        for report in reports:
            self._apply(report)
        if self.remote is not None:
            self.remote.handing.confirm()
        if output.invalid_block_ids and self._not_ours(output.invalid_block_ids):
            # What was computed from these blocks, in this step and in one that is under way,
            # may be in the tier already; which chunks those are is not known.
            self.core.fail("foreign", "another connector's load failed: the tier starts over")
            self._start_over(Since.THIS_START)
        for request_id in list(output.finished_recving or ()):
            state = self._requests.get(request_id)
            if state is None:
                continue
            self.loads.told(state, output)
            if state.load is None and state.request.is_finished():
                del self._requests[request_id]
                self.loads.room.gives(request_id)
            elif request_id in output.finished_recving:
                self._parked.add(request_id)

    def finished(self, request: Request, block_ids: Sequence[Sequence[int]]) -> Handed | None:
        """The request ends; its blocks are freed when this returns, unless they are waited for.

        Returns:
            What another engine can go on from; None if nothing is handed over.
        """
        state = self._requests.get(request.request_id)
        self.gate.gone(request.request_id)
        self.first_tokens.gone(request.request_id)
        if state is not None:
            self.loads.forget_fetch(state)
            self.loads.forget_handoff(state)
            if self.remote is not None and state.load is not None:
                self.remote.handing.drop(state)
        if state is None or state.load is not None:
            return None  # vLLM keeps the blocks of a load until the ranks have reported it
        del self._requests[request.request_id]
        self._parked.discard(request.request_id)
        self.loads.lost.discard(request.request_id)
        self.loads.room.gives(request.request_id)
        try:
            self.stores.finished(state, block_ids)
        except Exception:  # noqa: BLE001
            self.core.bug("planning a last store")
        return self.remote.finished(state, block_ids) if self.remote is not None else None

    def reset(self) -> None:
        """Forget everything stored; nothing from before is ever offered again.

        Unless the user said that no reset follows a change of the weights: then what was
        computed before is as good as what will be, also where it is still being copied.
        """
        if not self.core.settings.trust_after_reset:
            self._start_over(Since.EVER)

    def _start_over(self, since: Since) -> None:
        self.core.epoch += 1
        self.core.index.clear()
        if self.core.disk is not None:
            self.core.disk.forget(since)
        if self.remote is not None:
            self.remote.forget(since)
        self._notice_device_reset()
        self.stores.reset()
        self.loads.reset()

    def _not_ours(self, blocks: set[int]) -> bool:
        """Whether a block that failed to load is of no load of ours (beside another connector)."""
        loads = (state.load for state in self._requests.values() if state.load is not None)
        ours = {block for load in loads for copy in load.copies for block in copy.blocks}
        return not blocks <= ours

    def _drain_once(self) -> None:
        if not self._drained:
            self.drain()

    def drain(self) -> None:
        """Take in what the ranks sent between steps, once a step; does not wait."""
        self._drained = True
        if self.core.disk is not None:
            self.core.disk.take_in()
        if self._endpoint is not None and self.core.ledger.stores:
            self._drain_endpoint(self._endpoint)
        if self.remote is not None:
            self.remote.take_in()
        self.gate.go_on()

    def _drain_endpoint(self, endpoint: SchedulerEndpoint) -> None:
        for report in endpoint.drain():
            self._apply(report)
        if endpoint.malformed != self._malformed:
            self._malformed = endpoint.malformed
            self.core.fail("report", "a message on the side channel was not a report")

    def take_stats(self) -> metrics.TieredStats | None:
        """Counters since the last call and gauges that changed; None when there are none."""
        core = self.core
        if core.index.evicted != self._evicted:
            core.count_chunks("evicted", core.index.evicted - self._evicted)
            self._evicted = core.index.evicted
        slot_bytes = core.geometry.slot_bytes * core.settings.world_size
        gauges = {
            metrics.CAPACITY.key(TIER): float(core.index.num_slots * slot_bytes),
            metrics.USAGE.key(TIER): float(core.index.used_slots * slot_bytes),
            metrics.IN_FLIGHT.key("load"): float(len(core.ledger.loads)),
            metrics.IN_FLIGHT.key("store"): float(len(core.ledger.stores)),
        }
        if core.disk is not None:
            gauges |= core.disk.gauges()
        if self.remote is not None:
            gauges |= self.remote.gauges()
        if gauges == self._gauges:
            gauges = {}
        else:
            self._gauges = dict(gauges)
        if not gauges and not core.tally:
            return None
        counters, observed = core.tally.take(), core.tally.take_observed()
        data = {"counters": counters, "gauges": gauges, "observed": observed}
        return metrics.TieredStats(data=data)

    def take_events(self) -> Sequence[Any]:
        """KV events since the last call, at most one piece; vLLM asks in every step."""
        events = self.core.events
        if events is None:
            return ()
        try:
            # Before this call vLLM has taken its own, so a reset of the device is published.
            self._notice_device_reset()
            taken = events.take()
            if self.core.disk is not None and self.core.disk.events is not None:
                taken += self.core.disk.events.take()
            return taken
        except Exception:  # noqa: BLE001
            self.core.bug("publishing KV events")
            return ()

    def _notice_device_reset(self) -> None:
        """vLLM tells a connector nothing of a reset of the device's cache alone."""
        if self._pool is None:
            return
        cache = compat.device_cache(self._pool)
        if cache is self._device_cache:
            return
        self._device_cache = cache
        if self.core.events is not None:
            self.core.events.log.device_cleared()
            if self.core.disk is not None and self.core.disk.events is not None:
                self.core.disk.events.log.device_cleared()
        if compat.is_unused(self._pool):
            self.core.adapters.device_emptied()

    def _apply(self, report: WorkerReport) -> None:
        core = self.core
        for key, value in report.counters:
            core.tally.add(key, value)
        for adapter in report.adapters:
            core.adapters.report(report.rank, adapter)
        if report.slots is not None:
            core.index.limit(report.slots)
        for result in report.results:
            if result.direction is Direction.STORE:
                if (store := core.ledger.store_result(report.rank, result)) is not None:
                    self.stores.ended(result.job, store)
            elif (load := core.ledger.load_result(report.rank, result)) is not None:
                self.loads.settled(load)
        if self.remote is not None:  # after the results: what was given up may have ended since
            self.remote.report(report)

    def _state(self, request: Request) -> RequestState:
        state = self._requests.get(request.request_id)
        if state is not None:
            return state
        params = DEFAULT
        try:
            params = parse_params(request.kv_transfer_params)
        except ParamsError as error:
            self.core.fail("params", f"ignored: {error}")
        lora = compat.lora_of(request)
        name = LoraName(*lora) if lora is not None else None
        state = RequestState(request, params, name, self.core.clock())
        self._requests[request.request_id] = state
        if self.remote is not None:
            self.remote.arrived(state)
        elif params.handoff:
            self.core.fail("remote_role", HANDED_WITHOUT_REMOTE)
        return state


def _block_tables(output: SchedulerOutput, request_id: str) -> Sequence[Sequence[int]]:
    """The request's block ids by group, as this step has them; empty if unknown."""
    tables = output.kv_connector_block_state
    return (tables.get_block_ids(request_id) if tables is not None else None) or ()
