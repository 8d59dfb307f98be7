"""Public docstrings begin with a whole sentence: one that has a verb of its own.

It begins with a capital, a digit, a quote, code or an identifier, and ends with a full stop or colon. Before its first
semicolon or colon stands a finite verb outside relative and subordinate clauses: "Return the ...", "Holds ...", "A step
takes ...". "What a step takes." and "A step that takes ..." have none. A property reads like an attribute, so it may be
a noun phrase. As a script, this file lists what to mend: `python tests/test_docstrings.py headrace/scheduler`.
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "headrace"


VERBS = set(
    """accept accumulate acquire adapt add adjust admit advance affect aggregate agree allocate allow answer
    apologize append apply approximate arrange arrive ask assign assume attach attend attribute avoid await
    balance bear become begin belong benchmark bend benefit bill bind block borrow bound break bring broadcast
    build bypass cache calculate call cancel capture carry cast catch cause chain change chart check choose
    clamp clean clear close collect combine come compare compile complete compose compress compute concatenate
    concern configure connect consist consult consume contain continue contribute convert copy correct
    correspond cost count cover crash create cut decide decline decode decompress define deliver demote deny
    depend dequantize derive describe deserve detect determine detokenize differ disable disagree discard
    dispatch divide do dominate draft draw drop duplicate embed emit enable encapsulate encode end enforce
    enqueue ensure enter enumerate equal estimate evaluate evict examine exceed exclude execute exist exit
    expand expect expire explain expose express extend extract fade fail fall fan feed fetch fill filter
    finalize find finish fit flag flush fold follow force forget format forward free freeze fulfil fuse gather
    generate get give go govern group grow guarantee guard guess hand handle happen hash hear help hide hint hit
    hold hurt identify ignore imitate implement import improve include increase increment index infer inherit
    initialize insert inspect install interleave interpret intersect invert invoke isolate iterate join judge
    keep kill know label lack launch lead leak learn leave lend let lie lift limit link list live load locate
    lock log look lose lower maintain make map mark mask match matter mean measure meet mend mention merge mimic
    mirror mix model move multiply mutate name narrow need negate nest normalize note notify obey observe occupy
    occur offer open order outlive outrank overflow overlap overwrite own pack pad parse partition pass perform
    permit permute persist pick pin place plan point poll pop post precede predict preempt prefer prepare
    prescribe preserve prevent print probe produce profile project promise prompt propose provide pull push put
    quantize quit quote raise rank rate reach read rebuild receive reclaim recognize recommend recompute
    reconcile reconstruct record recover reduce reenter refer reference refuse register rehearse reject release
    rely remain remember remove rename render reorder repair repeat replace reply report represent request
    require rescore reserve reset reshape resolve respond rest restart restore resume retry return reuse revert
    rewrite rotate round route rule run sample sanitize satisfy save say scale scan scatter schedule score
    search see seed seem select send separate serialize serve set settle share shift ship show shrink shuffle
    shut simulate sit size skip sleep slice snapshot solve sort spawn speak specify spend spill split stack
    stall stand start state stay stem step stop store stream strip submit subtract suffice suggest suit sum
    summarize supply support suppose survive swallow swap sweep switch synchronize tag take talk tear tell
    terminate test think throw tie tile time tokenize tolerate touch trace track transfer transform translate
    transpose travel treat truncate trust try tune turn type understand unify unpack update upload use validate
    value vary verify view vote wait wake walk want warm warn watch weigh weight widen win wire wonder work wrap
    write yield zero""".split()
)  # fmt: skip
"""Verbs in their base form; one that is missing may be added."""

NOUNS_TOO = set(
    """answer ask back benchmark block cache call cause change chart check clean clear close complete copy
    correct cost count cut draft draw feed figure filter fit flag force format forward group guard guess hand
    hash help hit index kernel key label launch lie limit link list live load lock log look lower map mark mask
    match mean mix model name narrow need note number offer order own page pass pin place plan point poll pop
    present probe process profile project prompt push quote range rank rate record reference release report
    request reset rest result return round route row rule run sample save scale schedule score search seed
    separate set share shift size sleep slice snapshot sort split stack stall start state step stop store stream
    strip sum supply support sweep switch tag test tie tile time token trace track transfer transform transpose
    try turn type use value view vote wait walk watch weight work write zero""".split()
)  # fmt: skip
"""Verbs that are nouns or adjectives as well: they count where an object follows ("Names the file", not "Names of")."""

AUXILIARIES = set(
    """am are aren't can can't cannot could couldn't did didn't do does doesn't don't had has hasn't have
    haven't is isn't may might must mustn't need needn't shall should was wasn't were weren't will won't would
    wouldn't""".split()
)  # fmt: skip
PAST = {"came", "took", "ran", "gave", "began", "went", "knew", "grew", "saw", "wrote", "fell", "lay"}
SUBORDINATORS = set(
    """because how if once that unless until what whatever when whenever where wherever whether which while who
    whoever whom whose why""".split()
)  # fmt: skip
"""Words whose clause takes the next verb for itself."""
ARTICLES = {"the", "a", "an", "of", "its", "their", "all", "these", "those"}
OBJECTS = set(
    """a all an another any both codeword each every everything exactly four her his how it its itself more most
    no none nothing one only others our several some the their them themselves these this those three two what
    whatever where whether which who why your""".split()
)  # fmt: skip
"""Words that begin the object of a verb; `codeword` stands for code in backticks."""
PLURALS = {"they", "we", "you", "both", "all", "others", "people", "these", "those", "several", "many", "none"}
PRONOUNS = {"it", "this", "that", "one", "each", "nobody", "nothing", "everything", "everybody", "what", "codeword"}


def third_person(verb: str) -> str:
    """Return takes for take, tries for try, passes for pass."""
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ies"
    return verb + ("es" if verb.endswith(("s", "sh", "ch", "x", "z", "o")) else "s")


THIRD = {third_person(verb): verb for verb in VERBS}


def hide(pattern: str, text: str, marks: str) -> str:
    """Return a text of the same length, with `marks` inside of what matches blotted out."""
    return re.sub(pattern, lambda match: re.sub(f"[{marks}]", "\0", match[0]), text)


def first_sentence(docstring: str) -> str:
    """Return the text up to the first full stop, question or exclamation mark, or to the first empty line."""
    text = " ".join(re.split(r"\n\s*\n", docstring.strip())[0].split())
    seen = hide(r"\b(?:e\.g|i\.e|vs|etc)\.", hide(r"`[^`]*`|\"[^\"]*\"", text, ".?!"), ".")
    end = re.search(r"[.?!](?=\s|$|\)|\")", seen)
    return text[: end.end()] if end else text


def main_clause(sentence: str) -> str:
    """Return what stands before the first semicolon or colon; of "`name`: does this", what stands behind it."""
    seen = hide(r"`[^`]*`|\"[^\"]*\"|\([^()]*\)", sentence, ":;")
    cuts = [0, *(mark.end() for mark in re.finditer(r"[:;](?=\s|$)", seen)), len(sentence)]
    clauses = [sentence[begin:end].strip(" :;") for begin, end in itertools.pairwise(cuts)]
    clauses = [clause for clause in clauses if clause]
    return clauses[len(clauses) > 1 and bool(re.fullmatch(r"`[^`]*`", clauses[0]))]


def has_own_verb(clause: str) -> bool:
    """Return whether a finite verb stands outside relative and subordinate clauses."""
    clause = re.sub(r"\([^()]*\)", " ", re.sub(r"`[^`]*`", " codeword ", clause))
    words = [word.lower() for word in re.findall(r"[A-Za-z0-9_'’.\-/]*[A-Za-z0-9_]|,", clause)] + [""]
    if len(words) > 1 and leads(words[0], words[1]):
        return True
    open_clauses = 0
    for before, word, after in zip(["", *words], words, words[1:], strict=False):
        if subordinates(before, word, after):
            open_clauses += 1
        elif before and is_finite(before, word, after):
            if open_clauses:
                open_clauses -= 1
            elif before not in {"and", "or", "but", "nor", "then"}:
                return True
    return False


def leads(word: str, after: str) -> bool:
    """Return whether a first word is a verb: "Return the", "Names the file", not "Names of files"."""
    verb = THIRD.get(word, word)
    if verb not in VERBS or verb not in NOUNS_TOO:
        return verb in VERBS
    if after in OBJECTS or (word == verb and after not in {"", ",", "of", "that", "which", *AUXILIARIES}):
        return True
    intransitive = {"wait", "run", "start", "stop", "look", "walk", "turn", "stand", "check", "return", "work"}
    return verb in intransitive and after in {"to", "until", "in", "at", "on", "up", "out", "into", "down", "for"}


def subordinates(before: str, word: str, after: str) -> bool:
    """Return whether a clause begins whose verb is not the sentence's own."""
    if word in {"as", "than"}:
        return after in {"it", "they", "he", "users", "vllm", "one", "there", "we"}
    return word in SUBORDINATORS and before != "at" and not (word == "that" and after in {"of", "", ","})


def is_finite(before: str, word: str, after: str) -> bool:
    """Return whether a word that is not the first is a finite verb."""
    if word in AUXILIARIES:  # the first of a chain is the finite one: "can be", "has been"
        return before != "to" and before not in AUXILIARIES
    if word in THIRD:
        if THIRD[word] not in NOUNS_TOO:
            return before not in ARTICLES
        return before in PRONOUNS or (
            after in OBJECTS and before not in ARTICLES | {"in", "for", "with", "and", "which", "whose", "how"}
        )
    if word in VERBS and before not in {"to", "not", ",", "and", "or"} | ARTICLES | AUXILIARIES:
        plural = before.endswith("s") and not before.endswith(("'s", "s'", "ss", "us", "is"))
        return before in PLURALS or (plural and (word not in NOUNS_TOO or after in OBJECTS))
    return word in PAST


def complaint(docstring: str, is_property: bool = False) -> str:
    """Return what is wrong with a docstring's first sentence, or an empty text."""
    sentence = first_sentence(docstring)
    head = sentence.split()[0]
    if not re.match(r"[A-Z0-9`\"'*]|--|/", sentence) and not re.search(r"[._A-Z]", head[:-1]) and head != "headrace":
        return "begins with neither a capital nor code"
    if not sentence.endswith((".", ".)", '."', ":")):
        return "ends without a full stop or colon"
    if is_property and head.lower() not in SUBORDINATORS | {"of", "as", "from", "in", "for", "with"}:
        return ""
    return "" if has_own_verb(main_clause(sentence)) else "has no verb of its own"


def public_docstrings(path: Path) -> Iterator[tuple[int, str, str | None, bool]]:
    """Yield line, name, docstring and whether it is a property, of a module and all that is public in it."""

    def visit(node: ast.Module | ast.ClassDef, prefix: str) -> Iterator[tuple[int, str, str | None, bool]]:
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and child.name[0] != "_":
                decorators = {ast.unparse(decorator) for decorator in child.decorator_list}
                is_property = bool(decorators & {"property", "cached_property", "functools.cached_property"})
                yield child.lineno, prefix + child.name, ast.get_docstring(child), is_property
                if isinstance(child, ast.ClassDef):
                    yield from visit(child, f"{prefix}{child.name}.")

    tree = ast.parse(path.read_text())
    yield 1, "module", ast.get_docstring(tree), False
    yield from visit(tree, "")


EXCEPTIONS: dict[str, str] = {}
"""`file.py:name` below headrace/ -> the reason why its docstring need not begin with a whole sentence"""


def offenders(place: Path) -> Iterator[str]:
    """Yield a line for each docstring to mend, and for each module without one."""
    for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
        for line, name, docstring, is_property in public_docstrings(file):
            if f"{file.relative_to(PACKAGE)}:{name}" in EXCEPTIONS:
                continue
            if docstring is None and name == "module":
                yield f"{file}:{line} {name}: has no docstring"
            elif docstring is not None and (wrong := complaint(docstring, is_property)):
                yield f"{file}:{line} {name}: {wrong}: {first_sentence(docstring)!r}"


PLACES = sorted(path for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file())


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
def test_docstrings_begin_with_a_whole_sentence(place: Path) -> None:
    found = list(offenders(place))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "docstring",
    [
        "Return the tokens of a step.",
        "Holds what a rank knows, and forgets the rest.",
        "A step takes what the scheduler gave it.",
        "Blocks are freed in order.",
        "What is kept stays until the engine ends.",
        "`serve`: starts a server; returns its exit code.",
        "Names the file that is missing.",
        "`tokens` are those of one request.",
    ],
)
def test_whole_sentences_pass(docstring: str) -> None:
    assert complaint(docstring) == ""


@pytest.mark.parametrize(
    "docstring",
    [
        "What a step takes.",
        "A step that takes tokens and gives them back.",
        "Tokens of a step.",
        "Names of files.",
        "Whether it is full.",
        "Of one layer: returns its weights.",
        "the tokens are those of one request.",
        "Return the tokens of a step",
        "Seconds until what waits has begun.",
    ],
)
def test_fragments_do_not(docstring: str) -> None:
    assert complaint(docstring) != ""


def test_a_property_may_be_a_noun_phrase() -> None:
    assert complaint("The number of blocks.", is_property=True) == ""
    assert complaint("Whether it is full.", is_property=True) != ""


if __name__ == "__main__":
    lines = [line for name in sys.argv[1:] or [PACKAGE] for line in offenders(Path(name).resolve())]
    print(*lines, f"{len(lines)} to mend", sep="\n")
    sys.exit(bool(lines))
