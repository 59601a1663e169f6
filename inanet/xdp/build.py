"""Compile the kernel programs: ``python -m inanet.xdp.build`` rebuilds the committed objects, ``--check`` compares them.

An object depends on its source and the compiler only: no path, date or compiler banner is in it, DWARF is stripped
and BTF kept. Needs clang, llvm-strip and the headers of libbpf (Debian: clang llvm libbpf-dev); nobody else needs them,
as the objects are committed.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
#: of an aggregator's program, of a worker's, and of what loses packets in labs
OBJECT = HERE / "aggregator.bpf.o"
WORKER_OBJECT = HERE / "worker.bpf.o"
LOSS_OBJECT = HERE.parent / "lab" / "loss.bpf.o"
OBJECTS = (OBJECT, WORKER_OBJECT, LOSS_OBJECT)
#: release of clang that the committed objects were made with; others give other instructions
COMPILER = "14"
FLAGS = (
    "-target",
    "bpf",
    # the oldest instruction set with 32-bit registers and atomic operations: Linux 5.12
    "-mcpu=v3",
    "-O2",
    "-g",
    "-fno-ident",
    "-fdebug-compilation-dir=.",
    "-Wall",
    "-Wextra",
    "-Werror",
)


class CannotBuild(Exception):
    """The compiler is missing or refuses; the message says which and what to do."""


def compiler_release() -> str | None:
    """Major release of the clang that is installed, ``None`` without one."""
    if shutil.which("clang") is None:
        return None
    shown = subprocess.run(["clang", "-dumpversion"], capture_output=True, text=True, check=True).stdout
    return shown.strip().partition(".")[0]


def compile_program(target: Path, *defines: str, of: Path = OBJECT) -> None:
    """Compile the source of one of :data:`OBJECTS` to ``target``, with ``NAME=VALUE`` defined for measurements.

    Raises :class:`CannotBuild`.
    """
    for tool in ("clang", "llvm-strip"):
        if shutil.which(tool) is None:
            raise CannotBuild(f"{tool} is not installed: apt-get install clang llvm libbpf-dev")
    machine = subprocess.run(["uname", "-m"], capture_output=True, text=True, check=True).stdout.strip()
    include = f"-I/usr/include/{machine}-linux-gnu"
    command = [
        "clang",
        *FLAGS,
        include,
        *(f"-D{define}" for define in defines),
        "-c",
        of.with_suffix(".c").name,
        "-o",
        str(target.resolve()),
    ]
    for step in (command, ["llvm-strip", "-g", str(target)]):
        done = subprocess.run(step, cwd=of.parent, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CannotBuild(f"{step[0]} failed: {done.stderr.strip()}")


def main() -> int:
    """Build or compare. Returns 0 if all is well, 1 if an object is not what its source gives."""
    parser = argparse.ArgumentParser(prog="python -m inanet.xdp.build", description=main.__doc__)
    parser.add_argument(
        "--check", action="store_true", help="change nothing; fail if an object is out of date"
    )
    check = parser.parse_args().check
    release = compiler_release()
    if check and release != COMPILER:
        found = f"clang {release}" if release else "no clang"
        print(f"objects were made with clang {COMPILER}, here is {found}: not compared", file=sys.stderr)
        return 0
    stale = 0
    with tempfile.TemporaryDirectory() as folder:
        for committed in OBJECTS:
            fresh = Path(folder) / committed.name
            try:
                compile_program(fresh, of=committed)
            except CannotBuild as error:
                print(error, file=sys.stderr)
                return 1
            if not check:
                shutil.copyfile(fresh, committed)
            elif fresh.read_bytes() != committed.read_bytes():
                stale = 1
                print(
                    f"{committed.name} is not what its source gives: python -m inanet.xdp.build",
                    file=sys.stderr,
                )
    return stale


if __name__ == "__main__":
    raise SystemExit(main())
