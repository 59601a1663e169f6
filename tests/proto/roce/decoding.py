"""Captures as other people's decoders read them; skips where a decoder is not installed."""

import shutil
import subprocess
from pathlib import Path

import pytest


def check_checksums(path: Path) -> list[int]:
    """Require scapy to find every ICRC of a capture right; the packets' opcodes."""
    pytest.importorskip("scapy")
    from scapy.contrib.roce import BTH
    from scapy.utils import PcapReader

    opcodes = []
    with PcapReader(str(path)) as reader:
        for frame in reader:
            bth = frame[BTH]
            assert bth.compute_icrc(b"") == bth.icrc.to_bytes(4, "big")
            opcodes.append(bth.opcode)
    return opcodes


def dissect(path: Path, *fields: str) -> list[list[str]]:
    """A row of fields for every frame, from tshark."""
    tshark = shutil.which("tshark")
    if tshark is None:
        pytest.skip("tshark is not installed")
    wanted = [argument for field in fields for argument in ("-e", field)]
    done = subprocess.run(
        [
            tshark,
            "-n",
            "-o",
            "ip.check_checksum:TRUE",
            "-r",
            str(path),
            "-T",
            "fields",
            "-E",
            "occurrence=f",
            *wanted,
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return [line.split("\t") for line in done.stdout.splitlines()]
