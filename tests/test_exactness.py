"""kit/exactness.py: many drawn decodings against the target's rule, and it sees what is wrong."""

import json
from pathlib import Path

import hypothesis
import pytest

from minidflash import speculate as room
from minidflash.kit import exactness

RESULT = Path(__file__).parent.parent / "docs" / "results" / "exactness.json"


def test_drawn_cases_equal_the_rule():
    """Three hundred drawn cases (thorough profile: 100,000) write what the target's rule says."""
    cases = 100_000 if hypothesis.settings.get_current_profile_name() == "thorough" else 300
    tally = exactness.examine(cases)
    assert (tally.cases, tally.differences) == (cases, 0), tally.first
    assert len(tally.kinds) == 6 + (cases > 999), "every kind of drafter"
    wrong, _ = exactness.differences(exactness.draw_case(0, 999))
    assert not wrong, "random weights"


def test_a_case_is_the_same_wherever_it_is_drawn():
    """Case n of a seed does not depend on what was drawn before it, and other seeds draw others."""
    case = str(exactness.draw_case(3, 17))
    assert str(exactness.draw_case(3, 17)) == case
    assert str(exactness.draw_case(4, 17)) != case != str(exactness.draw_case(3, 18))


FAULTS = {
    "the bonus is another token": lambda verdict, draft, rows: verdict._replace(bonus=0),
    "one guess too many is kept": lambda verdict, draft, rows: verdict._replace(
        accepted=min(len(draft), verdict.accepted + 1)),
    "guesses are never kept": lambda verdict, draft, rows: verdict._replace(
        accepted=0, bonus=int(rows[0].argmax())),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_loop_is_seen(monkeypatch, fault):
    """A loop that verifies wrongly, or right but wastefully, is found within a hundred cases."""
    verify, spoil = room.verify, FAULTS[fault]
    monkeypatch.setattr(room, "verify", lambda draft, probs, rows, *rest: spoil(
        verify(draft, probs, rows, *rest), draft, rows))
    tally = exactness.examine(100)
    assert tally.differences and tally.first.startswith("case ")


def test_the_command_writes_what_it_found(tmp_path, capsys):
    """The command prints and writes the number of cases, of differences, and the time."""
    assert exactness.main(["--cases", "20", "--json", str(tmp_path / "r.json")]) == 0
    found = json.loads((tmp_path / "r.json").read_text())
    assert (found["cases"], found["differences"]) == (20, 0) and found["cpu_seconds"] >= 0
    assert json.loads(capsys.readouterr().out) == found
    with pytest.raises(SystemExit, match="2"):
        exactness.main(["--cases", "0"])


def test_the_result_that_is_shown_has_no_difference():
    """docs/results/exactness.json tells of 100,000 cases or more, and no difference."""
    found = json.loads(RESULT.read_text())
    assert found["cases"] >= 100_000 and found["differences"] == 0
    assert sum(found["drafters"].values()) == found["cases"] <= found["tokens"]
