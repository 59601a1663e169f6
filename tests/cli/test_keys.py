"""``ina keys``: an authority, certificates for nodes, and what they are for."""

from pathlib import Path

import pytest

from inanet.cli.main import main
from inanet.trust import authority
from inanet.trust.certificates import Keys
from inanet.trust.revocation_list import Revocations, parse


def test_an_authority_and_its_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "keys"
    assert main(["keys", "issue", str(directory), "w0"]) == 1
    assert f"'ina keys init {directory}' makes an authority" in capsys.readouterr().err
    assert main(["keys", "init", str(directory)]) == 0
    assert main(["keys", "init", str(directory)]) == 1
    assert "exists already" in capsys.readouterr().err
    assert main(["keys", "issue", str(directory), "w0", "w1", "--job", "train*", "--days", "2"]) == 0
    assert main(["keys", "issue", str(directory), "manager", "--coordinator"]) == 0
    assert main(["keys", "issue", str(directory), "no name"]) == 2
    capsys.readouterr()
    assert main(["keys", "show", str(directory / "w1.pem")]) == 0
    assert capsys.readouterr().out.startswith("inanet:node:w1\ninanet:role:worker\ninanet:job:train*\nuntil ")
    assert main(["keys", "show", str(directory / "manager.pem")]) == 0
    assert capsys.readouterr().out.startswith(
        "inanet:node:manager\ninanet:role:ps\ninanet:role:status\ninanet:coordinator\n"
    )
    assert main(["keys", "issue", str(directory), "a0", "--role", "aggregator,status", "--role", "ps"]) == 0
    assert authority.show(directory / "a0.pem").names == (
        "inanet:node:a0",
        "inanet:role:aggregator",
        "inanet:role:ps",
        "inanet:role:status",
    )
    assert main(["keys", "issue", str(directory), "a1", "--role", "aggregator,king"]) == 2
    assert "'king' is none of worker, aggregator, ps, switch, status" in capsys.readouterr().err
    assert main(["keys", "issue", str(directory), "a1", "--role", "aggregator", "--job", "x"]) == 2
    assert "jobs are for workers" in capsys.readouterr().err
    assert not (directory / "a1.pem").exists()
    Keys(str(directory / "ca.pem"), str(directory / "w0.pem")).client()
    Keys(str(directory / "ca.pem"), str(directory / "manager.pem")).server()
    (directory / "ca.key").unlink()
    assert main(["keys", "issue", str(directory), "w9"]) == 1
    assert "where 'ina keys init' was run" in capsys.readouterr().err
    assert main(["keys", "show", str(tmp_path / "keys" / "none.pem")]) == 1


def test_what_was_revoked_is_listed_and_can_be_issued_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "keys"
    assert main(["keys", "init", str(directory)]) == 0
    listed = directory / "revoked.txt"
    assert parse(listed.read_text()) == {}
    assert main(["keys", "issue", str(directory), "w0", "w1"]) == 0
    capsys.readouterr()
    assert main(["keys", "revoke", str(directory), "w0"]) == 0
    assert capsys.readouterr().out == (
        f"w0: 1 revoked\n{listed}  for the coordinator and all nodes, as control.revoked_file\n"
    )
    assert list(parse(listed.read_text()).values()) == ["w0"]
    assert not (directory / "w0.pem").exists()
    assert main(["keys", "issue", str(directory), "w0"]) == 0
    assert main(["keys", "revoke", str(directory), "w0", "w0"]) == 0
    assert "w0: 1 revoked\nw0: was revoked before\n" in capsys.readouterr().out
    assert len(parse(listed.read_text())) == 2
    assert main(["keys", "revoke", str(directory), "w7"]) == 1
    refused = capsys.readouterr().err
    assert "nothing was issued under that name" in refused
    assert "--certificate FILE, --serial HEX or --fingerprint HEX revoke a single one" in refused


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """An authority that has issued w0 and w1, before there was a list of what was issued."""
    authority.initialise(tmp_path, 1)
    for name in ("w0", "w1"):
        authority.issue(tmp_path, name, roles=("worker",), days=1)
    (tmp_path / "issued.txt").unlink()
    return tmp_path


def test_a_certificate_of_an_older_version_is_called_one(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(authority, "ROLE", "other:")
    authority.issue(directory, "old", roles=("worker",), days=1)
    assert main(["keys", "show", str(directory / "old.pem")]) == 0
    assert "no role, as older versions issued it" in capsys.readouterr().out
    assert main(["keys", "show", str(directory / "w0.pem")]) == 0
    assert "no role" not in capsys.readouterr().out


def revoked(directory: Path) -> dict[str, str]:
    return parse((directory / "revoked.txt").read_text())


def colons(digits: str) -> str:
    """As openssl prints them."""
    padded = digits.rjust(len(digits) + len(digits) % 2, "0").lower()
    return ":".join(padded[index : index + 2] for index in range(0, len(padded), 2))


@pytest.mark.parametrize("way", ["name", "certificate", "serial", "fingerprint"])
def test_what_no_list_knows_is_revoked_one_by_one(
    way: str, directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    issued = authority.show(directory / "w0.pem")
    own = tmp_path / "key.pem.of.the.node"
    own.write_bytes((directory / "w0.pem").read_bytes())
    given = {
        "name": ["w0"],
        "certificate": ["--certificate", str(own)],
        "serial": ["--serial", colons(issued.serial)],
        "fingerprint": ["--fingerprint", f"{colons(issued.fingerprint)}"],
    }[way]
    assert main(["keys", "revoke", str(directory), *given]) == 0
    assert capsys.readouterr().out.startswith("w0: 1 revoked\n")
    assert revoked(directory) == {issued.serial: "w0"}
    # another can be issued under the name, and nobody else is touched
    assert [file.name for file in sorted(directory.glob("*.pem"))] == ["ca.pem", "w1.pem"]
    assert Revocations(str(directory / "revoked.txt")).holds(issued.serial.rjust(42, "0"))
    if way in ("certificate", "serial"):
        assert main(["keys", "revoke", str(directory), *given]) == 0
        assert "was revoked before" in capsys.readouterr().out


def test_a_serial_number_or_a_fingerprint_that_only_the_list_knows(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (directory / "w0.pem").unlink()
    authority.issue(directory, "w0", roles=("worker",), days=1)
    issued = authority.show(directory / "w0.pem")
    (directory / "w0.pem").unlink()
    assert main(["keys", "revoke", str(directory), "--fingerprint", issued.fingerprint.lower()]) == 0
    assert main(["keys", "revoke", str(directory), "--serial", "00aB"]) == 0
    assert revoked(directory) == {issued.serial: "w0", "AB": "?"}
    assert "?: 1 revoked" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "code", "text"),
    [
        ([], 2, "whose? Give a NAME, --certificate, --serial or --fingerprint"),
        (["--serial", "12 34"], 2, "is no number in hexadecimal digits"),
        (["--serial", "-1"], 2, "is no number in hexadecimal digits"),
        (["--serial", "CA"], 2, "is the authority itself"),
        (["--fingerprint", "ab"], 2, "has 2 hexadecimal digits, a SHA-256 fingerprint has 64"),
        (["--fingerprint", "ab" * 32], 1, "has this fingerprint: give --certificate FILE or --serial HEX"),
        (["--certificate", "ca.pem"], 1, "is the authority itself"),
        (["--certificate", "other/w9.pem"], 1, "was not issued by"),
        (["--certificate", "revoked.txt"], 1, "holds no certificate"),
        (["--certificate", "none.pem"], 1, "there is no "),
    ],
)
def test_what_cannot_be_revoked_is_said(
    given: list[str], code: int, text: str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    authority.initialise(directory / "other", 1)
    authority.issue(directory / "other", "w9", roles=("worker",), days=1)
    if given[:1] == ["--certificate"]:
        given = [given[0], str(directory / given[1])]
    if given == ["--serial", "CA"]:
        given = ["--serial", authority.show(directory / "ca.pem").serial]
    assert main(["keys", "revoke", str(directory), *given]) == code
    assert text in capsys.readouterr().err
    # nor is what can be, if it stands beside
    if given:
        assert main(["keys", "revoke", str(directory), "w0", "w1", *given]) == code
        said = capsys.readouterr()
        assert text in said.err
        assert said.out == ""
    assert main(["keys", "revoke", str(directory), "w0", "nobody", *given]) == 1
    assert revoked(directory) == {}
    assert (directory / "w0.pem").exists()


def test_a_list_is_read_again_when_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "revoked.txt"
    file.write_text("# none\n00AB w0  # lost\n")
    revoked = Revocations(str(file))
    assert revoked.holds("ab")
    assert not revoked.holds("CD")
    file.write_text("CD w1\n")
    assert revoked.holds("0cd")
    assert not revoked.holds("AB")
    # what cannot be read changes nothing
    file.write_text("nonsense, and more of it\n")
    assert revoked.holds("CD")
    file.unlink()
    assert revoked.holds("CD")
    with pytest.raises(ValueError, match="line 1 is 'nonsense"):
        parse("nonsense, and\n")


def test_a_list_that_could_not_be_read_is_tried_again_though_it_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copied without the right to read it, then put right; or no descriptor was left at that moment."""
    file = tmp_path / "revoked.txt"
    file.write_text("")
    revoked = Revocations(str(file))
    file.write_text("AB w0\n")
    with monkeypatch.context() as refused:

        def read_text(*_: object) -> str:
            raise PermissionError(13, "Permission denied")

        refused.setattr(Path, "read_text", read_text)
        assert not revoked.holds("AB")
    assert revoked.holds("AB")
