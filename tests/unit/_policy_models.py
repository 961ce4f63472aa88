# SPDX-License-Identifier: Apache-2.0
"""The policies as their papers print them, one page at a time: slow and plain."""

from __future__ import annotations

from vllm_tiered_kv.policies.cost import compute_cost
from vllm_tiered_kv.policies.policy import Item


class LRUModel:
    def __init__(self, size: int) -> None:
        self.size = size
        self.pages: list[int] = []

    def request(self, page: int, item: Item) -> bool:
        hit = page in self.pages
        if hit:
            self.pages.remove(page)
        elif len(self.pages) == self.size:
            self.pages.pop(0)
        self.pages.append(page)
        return hit

    def contents(self) -> set[int]:
        return set(self.pages)


class S3FIFOModel:
    """Algorithm 1 of the paper; the tail of a queue is at index 0."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghosts: list[int] = []
        self.freq: dict[int, int] = {}

    def request(self, page: int, item: Item) -> bool:
        if page in self.small or page in self.main:
            self.freq[page] = min(self.freq[page] + 1, 3)
            return True
        while len(self.small) + len(self.main) >= self.size:
            self.evict()
        if page in self.ghosts:
            self.ghosts.remove(page)
            self.main.append(page)
        else:
            self.small.append(page)
        self.freq[page] = 0
        return False

    def evict(self) -> None:
        if len(self.small) >= 0.1 * self.size:
            self.evict_small()
        else:
            self.evict_main()

    def evict_small(self) -> None:
        while self.small:
            page = self.small.pop(0)
            if self.freq[page] > 1:
                self.main.append(page)
                self.freq[page] = 0
                if len(self.main) > 0.9 * self.size:
                    return self.evict_main()
            else:
                self.ghosts.append(page)
                if len(self.ghosts) > 0.9 * self.size:
                    self.ghosts.pop(0)
                return None
        return None

    def evict_main(self) -> None:
        while self.main:
            page = self.main.pop(0)
            if not self.freq[page]:
                return
            self.freq[page] -= 1
            self.main.append(page)

    def contents(self) -> set[int]:
        return {*self.small, *self.main}


class ARCModel:
    """Figure 4 of the paper; the least recent page of a list is at index 0."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []
        self.p = 0.0

    def request(self, page: int, item: Item) -> bool:
        t1, t2, b1, b2, c = self.t1, self.t2, self.b1, self.b2, self.size
        if page in t1 or page in t2:
            (t1 if page in t1 else t2).remove(page)
            t2.append(page)
            return True
        if page in b1:
            self.p = min(self.p + max(1.0, len(b2) / len(b1)), c)
            self.replace(page)
            b1.remove(page)
            t2.append(page)
            return False
        if page in b2:
            self.p = max(self.p - max(1.0, len(b1) / len(b2)), 0.0)
            self.replace(page)
            b2.remove(page)
            t2.append(page)
            return False
        if len(t1) + len(b1) == c:
            if len(t1) < c:
                b1.pop(0)
                self.replace(page)
            else:
                t1.pop(0)
        else:
            total = len(t1) + len(t2) + len(b1) + len(b2)
            if total >= c:
                if total == 2 * c:
                    b2.pop(0)
                self.replace(page)
        t1.append(page)
        return False

    def replace(self, page: int) -> None:
        t1 = self.t1
        if t1 and (len(t1) > self.p or (page in self.b2 and len(t1) == self.p)):
            self.b1.append(t1.pop(0))
        else:
            self.b2.append(self.t2.pop(0))

    def contents(self) -> set[int]:
        return {*self.t1, *self.t2}


class CostModel:
    """GreedyDual-Size-Frequency: the worth of each page, and the least of all goes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.worth: dict[int, tuple[float, int, int]] = {}
        self.uses: dict[int, int] = {}
        self.age, self.clock = 0.0, 0

    def request(self, page: int, item: Item) -> bool:
        hit = page in self.worth
        if not hit and len(self.worth) == self.size:
            victim = min(self.worth, key=lambda page: self.worth[page])
            self.age = self.worth.pop(victim)[0]
            del self.uses[victim]
        self.clock += 1
        self.uses[page] = self.uses.get(page, 0) + 1
        worth = self.age + self.uses[page] * compute_cost(item) / item.nbytes
        self.worth[page] = (worth, -item.position, self.clock)
        return hit

    def contents(self) -> set[int]:
        return set(self.worth)
