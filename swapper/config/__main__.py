"""`python -m swapper.config --schema FILE` writes the JSON schema that editors check config files by."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from swapper.config import json_schema


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m swapper.config", description="The JSON schema of config files.")
    parser.add_argument(
        "--schema", metavar="FILE", nargs="?", const="-", required=True, help="write it to FILE; without FILE, print it"
    )
    target = parser.parse_args().schema
    text = json.dumps(json_schema(), indent=2)
    if target == "-":
        print(text)
    else:
        Path(target).write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    _main()
