# SPDX-License-Identifier: Apache-2.0
"""``python -m tools.tinymodels VARIANT --out FOLDER [--dtype float32] [--seed 0]``."""

from __future__ import annotations

import argparse
from pathlib import Path

from tools.tinymodels import LORA_VARIANT, MODEL_VARIANTS, build_lora, build_model


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.tinymodels", description=__doc__)
    parser.add_argument("variant", choices=[*MODEL_VARIANTS, LORA_VARIANT])
    parser.add_argument("--out", type=Path, help="default: build/models/VARIANT")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    out = args.out or Path("build/models") / args.variant
    if args.variant == LORA_VARIANT:
        path = build_lora(out, dtype=args.dtype, seed=args.seed)
    else:
        path = build_model(args.variant, out, dtype=args.dtype, seed=args.seed)
    print(path)


if __name__ == "__main__":
    main()
