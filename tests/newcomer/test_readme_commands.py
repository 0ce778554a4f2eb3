"""README's commands as a newcomer types them: by a user without rights, in a Debian that has what README names and
nothing else. The configuration of this machine's pip is there as well: a registry is what README takes for granted.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.pages import assert_said, blocks

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
SUITE = "bookworm"
"""Debian with Python 3.11."""
USER, UID = "newcomer", 1000
HOME = Path("home") / USER
LONGEST_S = 1_200
pytestmark = pytest.mark.timeout(3 * LONGEST_S)


class Container:
    """A root file system, and mounts that end with the processes in it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def run(self, command: str) -> str:
        """Run a command of a shell in the folder of the project, as the newcomer; return what it wrote."""
        mounts = [f"mount -t proc proc {self.root}/proc", f"mount --rbind /dev {self.root}/dev"]
        for path in _configuration_of_pip():
            target = self.root / path.relative_to("/")
            kind = "mkdir -p" if path.is_dir() else "touch"
            mounts += [f"mkdir -p {target.parent}", f"{kind} {target}", f"mount --bind {path} {target}"]
        inside = f"cd ~/perseus-k8s && {command}"
        user = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "bash", "-ec", inside]
        outside = " && ".join([*mounts, f'exec chroot {self.root} "$@"'])
        environment = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        environment |= {
            "HOME": f"/{HOME}",
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG": "C.UTF-8",
            "COLUMNS": "120",
        }
        done = subprocess.run(
            ["unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-ec", outside, "bash", *user],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LONGEST_S,
            check=False,
        )
        assert done.returncode == 0, f"$ {command}\n{done.stdout}"
        return done.stdout


def _configuration_of_pip() -> list[Path]:
    """Files of this machine by which its pip and its resolver find a registry."""
    named = [os.environ.get(name, "") for name in ("PIP_CERT", "PIP_FIND_LINKS", "PIP_CONFIG_FILE")]
    usual = ["/etc/pip.conf", "/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs"]
    paths = {Path(path) for path in [*named, *usual] if path.startswith("/")}
    inside = {path for path in paths if any(other in path.parents for other in paths)}
    return sorted(path for path in paths - inside if path.exists())


def packages() -> Sequence[str]:
    """What README says to install on Debian."""
    (named,) = re.findall(r"apt-get install ([\w. -]+)`", README.read_text(encoding="utf-8"))
    return str(named).split()


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    if os.geteuid() != 0 or shutil.which("mmdebstrap") is None:
        pytest.skip("needs root and mmdebstrap (Debian: apt-get install mmdebstrap)")
    root = tmp_path_factory.mktemp("debian")
    wanted = f"--include={','.join(packages())}"
    subprocess.run(["mmdebstrap", "--quiet", "--variant=minbase", wanted, SUITE, root], check=True)
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    files = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, files.split("\0")):
        target = root / HOME / "perseus-k8s" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    with (root / "etc" / "passwd").open("a") as users:
        users.write(f"{USER}:x:{UID}:{UID}::/{HOME}:/bin/bash\n")
    subprocess.run(["chown", "--recursive", f"{UID}:{UID}", root / HOME], check=True)
    yield Container(root)
    shutil.rmtree(root)


def test_a_newcomer_gets_what_readme_shows(container: Container) -> None:
    """`make demo` fails by itself if it has not observed what it says."""
    (commands,) = blocks(README)
    for command, shown in commands:
        print(f"$ {command}")
        said = container.run(command)
        print(said)
        assert_said(shown, said)
