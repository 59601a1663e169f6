"""Compile the kernel program: ``python -m inanet.xdp.build`` rebuilds the committed object, ``--check`` compares it.

The object depends on the source and the compiler only: no path, date or compiler banner is in it, DWARF is stripped
and BTF kept. Needs clang, llvm-strip and the headers of libbpf (Debian: clang llvm libbpf-dev); nobody else needs them,
as the object is committed.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "aggregator.bpf.c"
OBJECT = HERE / "aggregator.bpf.o"
#: release of clang that the committed object was made with; others give other instructions
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


def compile_program(target: Path, *defines: str) -> None:
    """Compile to ``target``, with ``NAME=VALUE`` defined for measurements. Raises :class:`CannotBuild`."""
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
        SOURCE.name,
        "-o",
        str(target),
    ]
    for step in (command, ["llvm-strip", "-g", str(target)]):
        done = subprocess.run(step, cwd=HERE, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CannotBuild(f"{step[0]} failed: {done.stderr.strip()}")


def main() -> int:
    """Build or compare. Returns 0 if all is well, 1 if the object is not what the source gives."""
    parser = argparse.ArgumentParser(prog="python -m inanet.xdp.build", description=main.__doc__)
    parser.add_argument(
        "--check", action="store_true", help="change nothing; fail if the object is out of date"
    )
    check = parser.parse_args().check
    release = compiler_release()
    if check and release != COMPILER:
        found = f"clang {release}" if release else "no clang"
        print(f"{OBJECT.name} was made with clang {COMPILER}, here is {found}: not compared", file=sys.stderr)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder) / OBJECT.name
        try:
            compile_program(fresh)
        except CannotBuild as error:
            print(error, file=sys.stderr)
            return 1
        if not check:
            shutil.copyfile(fresh, OBJECT)
        elif fresh.read_bytes() != OBJECT.read_bytes():
            print(f"{OBJECT.name} is not what its source gives: python -m inanet.xdp.build", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
