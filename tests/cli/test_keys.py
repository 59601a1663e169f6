"""``ina keys``: an authority, certificates for nodes, and what they are for."""

from pathlib import Path

import pytest

from inanet.cli.main import main
from inanet.control.revocation import Revocations, parse
from inanet.control.trust import Keys


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
    assert capsys.readouterr().out.startswith("inanet:node:w1\ninanet:job:train*\nuntil ")
    assert main(["keys", "show", str(directory / "manager.pem")]) == 0
    assert "inanet:coordinator" in capsys.readouterr().out
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
    assert "nothing was issued under that name" in capsys.readouterr().err


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
