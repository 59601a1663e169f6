"""``ina keys``: an authority, certificates for nodes, and what they are for."""

from pathlib import Path

import pytest

from inanet.cli.main import main
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
