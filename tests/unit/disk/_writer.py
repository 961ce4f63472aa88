# SPDX-License-Identifier: Apache-2.0
"""A process that writes and removes all the time, until it is killed: `python -m ... FOLDER`."""

from __future__ import annotations

import random
import sys
import threading
import time
from pathlib import Path

from tests.unit.disk._files import mode_of, rank_folder, write
from vllm_tiered_kv.tiers.disk.store import RankFolder

KEYS = [bytes([i]) * 32 for i in range(24)]
NBYTES = (1 << 20) + 100


def work(folder: RankFolder) -> None:
    choice = random.Random()
    while True:
        key = choice.choice(KEYS)
        if not folder.remove(key, 0):
            write(folder, key, nbytes=NBYTES, used_ns=time.time_ns())


def main() -> None:
    root = Path(sys.argv[1])
    folder = rank_folder(root, mode=mode_of(root))
    write(folder, KEYS[0], nbytes=NBYTES)
    print("writing", flush=True)
    for _ in range(2):
        threading.Thread(target=work, args=(folder,)).start()


if __name__ == "__main__":
    main()
