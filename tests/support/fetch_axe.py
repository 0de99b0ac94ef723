"""Fetches axe-core, the accessibility checks, from npm's registry: a fixed version, checked by its hash.

    python tests/support/fetch_axe.py FOLDER      # writes FOLDER/axe.min.js, unless it is there

axe-core is licensed under the MPL 2.0. It is used by the tests only and is not part of any distribution.
"""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import tarfile
from pathlib import Path

VERSION = "4.14.1"
SHA512 = "FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ=="
"""Of the package, as the registry gives it, in base64."""


def fetch(folder: Path) -> Path:
    """The path of the script. Raises ValueError if the package is not the expected one."""
    script = folder / f"axe-{VERSION}.min.js"
    if not script.exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            ["npm", "pack", "--silent", f"axe-core@{VERSION}", "--pack-destination", str(folder)],
            check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        package = folder / f"axe-core-{VERSION}.tgz"
        found = base64.b64encode(hashlib.sha512(package.read_bytes()).digest()).decode()
        if found != SHA512:
            raise ValueError(f"{package}: its SHA-512 is {found}, not {SHA512}")
        with tarfile.open(package) as files:
            member = files.extractfile("package/axe.min.js")
            assert member is not None
            part = script.with_suffix(".part")
            part.write_bytes(member.read())
            part.rename(script)
        package.unlink()
    return script


if __name__ == "__main__":
    print(fetch(Path(sys.argv[1])))
