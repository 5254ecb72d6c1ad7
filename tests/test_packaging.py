"""What users install is built from a source distribution, if not from a clone."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.long
def test_the_source_distribution_has_all_that_a_clone_has(tmp_path: Path) -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    listed = ["git", "-C", str(ROOT), "ls-files", "-z"]
    names = subprocess.run(listed, check=True, capture_output=True, text=True, timeout=60).stdout
    files = {name for name in names.split("\0") if name and (ROOT / name).is_file()}
    clone = tmp_path / "clone"  # It writes there.
    for name in files:
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    made = "from setuptools.build_meta import build_sdist; build_sdist('..')"
    subprocess.run([sys.executable, "-c", made], cwd=clone, check=True, capture_output=True, timeout=120)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        packed = {name.partition("/")[2] for name in tar.getnames()}
    assert files
    assert not files - packed
