"""`python -m swapper.config --schema FILE` writes the JSON schema that editors check config files by."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from swapper.config import json_schema


def _main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m swapper.config", description="The JSON schema of config files.")
    parser.add_argument(
        "--schema", metavar="FILE", nargs="?", const="-", required=True, help="write it to FILE; without FILE, print it"
    )
    target = parser.parse_args(arguments).schema
    text = json.dumps(json_schema(), indent=2) + "\n"
    if target == "-":
        sys.stdout.write(text)
    else:
        Path(target).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
