"""The proofs that Coq checks: nothing is left unproved, and Coq refuses them for another merge."""

import re
import shutil
import subprocess

import pytest
from pages import MAIN_ROAD, REPOSITORY, text

PROOFS = REPOSITORY / "notebooks" / "proofs" / "merge.v"
UNPROVED = r"\b(Admitted|admit|Axioms?|Parameters?|Conjecture|Hypothes[ie]s|give_up|Unset)\b"
LIBRARY = {  # on which Coq's own real numbers rest
    "ClassicalDedekindReals.sig_not_dec",
    "ClassicalDedekindReals.sig_forall_dec",
    "functional_extensionality_dep",
    "FunctionalExtensionality.functional_extensionality_dep",
    "Classical_Prop.classic",
}
ONE_SIDED = ("let wb := exp (mb - m) in", "let wb := 1 in")
NO_PIVOT = ("let m := Rmax ma mb in", "let m := ma in")


def test_nothing_is_left_unproved():
    """Each claim has a theorem, and each theorem is among those whose assumptions Coq prints."""
    code = re.sub(r"(?s)\(\*.*?\*\)", "", PROOFS.read_text())
    assert not re.search(UNPROVED, code.replace("Print Assumptions", ""))
    claims = re.findall(r"Definition (\w+) : Prop :=", code)
    theorems = dict(re.findall(r"Theorem (\w+) : (\w+)\.", code))
    assert len(claims) == 7 and sorted(claims) == sorted(theorems.values())
    assert re.findall(r"Print Assumptions (\w+)\.", code) == list(theorems)
    assert code.count("Proof.") == code.count("Qed.") == len(re.findall(r"Theorem|Lemma", code))


def checked(text: str, folder) -> subprocess.CompletedProcess:
    if shutil.which("coqc") is None:
        pytest.skip("no coqc: the proofs are not checked (Debian's coq)")
    (folder / "merge.v").write_text(text)
    command = ["coqc", "merge.v"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_coq_accepts_the_proofs(tmp_path):
    """With no axiom but those of its library."""
    run = checked(PROOFS.read_text(), tmp_path)
    assert run.returncode == 0, run.stderr
    used = set(re.findall(r"(?m)^([\w.]+)(?= :|$)", run.stdout))
    assert used and used <= LIBRARY


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [ONE_SIDED, NO_PIVOT])
def test_coq_refuses_another_merge(tmp_path, mistake):
    text = PROOFS.read_text()
    assert text.count(mistake[0]) == 1
    run = checked(text.replace(*mistake), tmp_path)
    assert run.returncode != 0 and "Error" in run.stderr


def test_each_claim_names_a_section_that_exists():
    headings = {x for path in MAIN_ROAD for x in re.findall(r"(?m)^## (.+)$", text(path))}
    named = re.findall(r'\(\* 04, "([^"]+)":', PROOFS.read_text())
    assert len(named) == 6 and set(named) <= headings
