"""A host of its own for tests: the distribution's systemd as process 1 of private namespaces, on a copy-on-write view of this
machine's files, with inanet installed from its wheel.

Nothing it does reaches the machine: the root is an overlay whose upper layer is memory, /run, /tmp and /dev are its own before systemd
starts (which clears /tmp), so are network, process ids, IPC, and cgroups below one that is removed at the end.
"""

import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import site
import socket
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from inanet.service.kernels import prepare

ROOT = Path(__file__).parents[2]
SYSTEMD = Path("/usr/lib/systemd/systemd")
#: seconds until systemd has booted, and for a command in it
PATIENCE = 60.0
#: where the environment is, as docs/deploy.md has it, and what it is made of
HOME = Path("/usr/local/lib/inanet")
_PYTHON, _PACKAGES = Path("/usr/local/lib/inanet-python"), Path("/usr/local/lib/inanet-packages")

_BOOT = """
set -eu
base=$1; wheel=$2; python=$3; packages=$4; outside=$5
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs "$base"
mkdir "$base/upper" "$base/work" "$base/root"
mount -t overlay -o "lowerdir=/,upperdir=$base/upper,workdir=$base/work" overlay "$base/root"
r=$base/root
mkdir -p "$r$6" "$r$7" "$r$8"
mount --bind "$wheel" "$r$6"
mount --bind "$python" "$r$7"
mount --bind "$packages" "$r$8"
mount -t proc proc "$r/proc"
mount -t sysfs sysfs "$r/sys"
mount -t cgroup2 cgroup2 "$r/sys/fs/cgroup"
mount -t tmpfs -o mode=755 tmpfs "$r/run"
mount -t tmpfs -o mode=1777 tmpfs "$r/tmp"
mount -t tmpfs -o mode=755 tmpfs "$r/dev"
for node in null zero full random urandom tty; do touch "$r/dev/$node"; mount --bind /dev/$node "$r/dev/$node"; done
mkdir "$r/dev/pts" "$r/dev/shm" "$r/run/outside" "$r/run/old"
mount -t tmpfs -o mode=1777 tmpfs "$r/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$r/dev/pts"
ln -s pts/ptmx "$r/dev/ptmx"
mount --bind "$outside" "$r/run/outside"
cd "$r"
pivot_root . run/old
umount -l /run/old
# as container managers do: services get their credentials by propagation
mount --make-rshared /
rm -rf /etc/systemd/system/*.wants /etc/inanet /etc/systemd/system/ina-* /usr/local/bin/ina* /var/log/journal
mkdir -p /etc/systemd/system
for unit in systemd-udevd.service systemd-udev-trigger.service systemd-logind.service timers.target e2scrub_reap.service \
        systemd-networkd.service systemd-resolved.service systemd-timesyncd.service systemd-update-utmp.service \
        systemd-binfmt.service systemd-sysctl.service systemd-modules-load.service; do
    ln -sf /dev/null /etc/systemd/system/$unit
done
ip link set lo up
echo lab > /etc/hostname
printf '127.0.0.1 localhost\\n127.0.1.1 lab\\n' > /etc/hosts
# an interpreter that is seen elsewhere than where it was built
mkdir -p /etc/systemd/system.conf.d
printf '[Manager]\\nDefaultEnvironment=LD_LIBRARY_PATH=%s/lib\\n' "$7" > /etc/systemd/system.conf.d/python.conf
exec env -i container=other PATH=/usr/local/bin:/usr/bin:/bin NOTIFY_SOCKET=/run/outside/notify \
    /usr/lib/systemd/systemd --unit=basic.target --log-target=console --show-status=no
"""


def _why_not() -> str | None:
    if os.geteuid() != 0:
        return "needs root"
    for program in ("unshare", "nsenter", "pivot_root", "ip"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    if not SYSTEMD.exists():
        return "systemd is not installed (Debian: apt-get install systemd)"
    if _cgroups() is None:
        return "no cgroup2 hierarchy is mounted here"
    if "overlay" not in Path("/proc/filesystems").read_text().split():
        return "the kernel has no overlayfs"
    return None


def _cgroups() -> Path | None:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, *_ = line.split()
        if kind == "cgroup2" and os.access(place, os.W_OK):
            return Path(place)
    return None


def require() -> None:
    """Skip with the reason where there cannot be such a machine, fail where there must be."""
    if (reason := _why_not()) is not None:
        if os.environ.get("INA_REQUIRE_PRIVILEGED") == "1":
            pytest.fail(f"a systemd of its own: {reason}")
        pytest.skip(reason)


def environment(folder: Path) -> None:
    """A virtual environment in ``folder``, to be seen at :data:`HOME`, with inanet from a wheel that is built here, and the
    kernels that are compiled already. Its other packages are those of this process.
    """
    wheels = folder.with_name(f"{folder.name}-wheel")
    wheels.mkdir()
    build = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(wheels)], cwd=ROOT, check=True, capture_output=True)
    (wheel,) = wheels.glob("*.whl")
    version = f"python{sysconfig.get_python_version()}"
    packages = folder / "lib" / version / "site-packages"
    packages.mkdir(parents=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
        (entries,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        scripts = archive.read(entries).decode()
    # what is missing is compiled once for all runs of the tests, not in a copy that goes with this one
    prepare(["all"])
    for kernel in (ROOT / "inanet").rglob("__pycache__/*.nb[ci]"):
        target = packages / kernel.relative_to(ROOT)
        target.parent.mkdir(exist_ok=True)
        shutil.copy2(kernel, target)
    (packages / "others.pth").write_text(f"{_PACKAGES}\n")
    (folder / "pyvenv.cfg").write_text(f"home = {_PYTHON}/bin\ninclude-system-site-packages = false\n")
    programs = folder / "bin"
    programs.mkdir()
    (programs / "python").symlink_to(_PYTHON / "bin" / version)
    for line in scripts.partition("[console_scripts]\n")[2].partition("\n[")[0].split("\n"):
        name, _, target = line.partition(" = ")
        if name:
            module, _, function = target.partition(":")
            text = (
                f"#!{HOME}/bin/python\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n"
            )
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)


@dataclass
class Machine:
    """A booted machine. ``outside`` is a folder of this one, at /run/outside there."""

    pid: int
    outside: Path

    def run(
        self, *command: str, check: bool = True, seconds: float = PATIENCE
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as root and wait for it. With ``check`` it must end with 0."""
        done = subprocess.run(
            self.command(*command),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
        assert not check or done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done

    def command(self, *command: str) -> list[str]:
        """The command line, from here."""
        clean = (
            "env",
            "-i",
            "--chdir=/",
            f"LD_LIBRARY_PATH={_PYTHON}/lib",
            "PATH=/usr/local/bin:/usr/bin:/bin",
            "HOME=/root",
            "LANG=C.UTF-8",
        )
        return ["nsenter", f"--target={self.pid}", "--all", *clean, *command]

    def show(self, unit: str, *properties: str) -> dict[str, str]:
        """Properties of a unit."""
        done = self.run("systemctl", "show", unit, *(f"--property={one}" for one in properties))
        return dict(line.split("=", 1) for line in done.stdout.splitlines())

    def journal(self, *match: str) -> list[dict[str, Any]]:
        """Entries of the journal, the oldest first."""
        self.run("journalctl", "--sync")
        done = self.run("journalctl", "--output=json", "--no-pager", "--all", *match)
        return [json.loads(line) for line in done.stdout.splitlines()]


@contextlib.contextmanager
def booted(folder: Path) -> Iterator[Machine]:
    """A machine, taken down at the end with all that runs on it. ``folder`` is empty."""
    require()
    base, outside, home = (folder / name for name in ("base", "outside", "home"))
    for one in (base, outside):
        one.mkdir()
    environment(home)
    for one in (folder, *home.rglob("*")):
        if not one.is_symlink() and (one.is_dir() or one == folder):
            one.chmod(0o755)
    root = _cgroups()
    assert root is not None
    group = root / f"inanet-test-{os.getpid()}-{secrets.token_hex(4)}"
    group.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told, (folder / "boot.log").open("wb") as log:
        told.bind(str(outside / "notify"))
        (outside / "notify").chmod(0o666)
        base_python = Path(sys.base_prefix)
        arguments = (base, home, base_python, site.getsitepackages()[0], outside, HOME, _PYTHON, _PACKAGES)
        namespaces = ("--mount", "--pid", "--net", "--uts", "--ipc", "--cgroup", "--fork", "--kill-child")
        # in its cgroup before the namespaces are made, so that it is the root of what they see
        join = f'echo $$ > {group}/cgroup.procs && exec "$@"'
        process = subprocess.Popen(
            # goes with this process, however that ends
            [
                "sh",
                "-c",
                join,
                "sh",
                "setpriv",
                "--pdeathsig=KILL",
                "unshare",
                *namespaces,
                "sh",
                "-c",
                _BOOT,
                "boot",
                *map(str, arguments),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            while True:
                readable, _, _ = select.select([told], [], [], PATIENCE)
                assert readable, f"systemd did not boot: {(folder / 'boot.log').read_text()}"
                if b"READY=1" in told.recv(4096):
                    break
            # systemd would wait for a reader of what else it has to say
            told.close()
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            yield Machine(int(children[0]), outside)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
            _remove(group)


def _remove(group: Path) -> None:
    """Cgroups go from the leaves up, once nobody is in them, which the kernel tells."""
    for one in sorted(group.rglob("*"), key=lambda path: -len(path.parts)):
        if one.is_dir():
            _empty(one)
            one.rmdir()
    _empty(group)
    group.rmdir()


def _empty(group: Path) -> None:
    events = group / "cgroup.events"
    with events.open() as file:
        poll = select.poll()
        poll.register(file, select.POLLPRI)
        while "populated 1" in (file.seek(0), file.read())[1]:
            assert poll.poll(PATIENCE * 1000), f"{group} does not become empty"


def names(entries: Sequence[dict[str, Any]], event: str) -> list[str]:
    """The nodes that logged an event."""
    return [entry["NODE"] for entry in entries if entry.get("EVENT") == event]
