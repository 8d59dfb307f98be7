"""GBNF and EBNF as their documentation has them, what is wrong with others, and bounds."""

import time

import pytest

from headrace.errors import RequestError
from headrace.structured_outputs.conversion import of_grammar
from headrace.structured_outputs.ebnf import is_ebnf, lark_of_ebnf
from tests.structured_outputs.support import accepts, matcher_of

CASES = [
    ('root ::= "0x" [A-F0-9]{2} ("-" [a-c]?)*', ["0x1F", "0xFF-a-"], ["0x1", "0xff", "0xFFa"]),
    ('root ::= "a" root "b" | ""', ["", "ab", "aaabbb"], ["a", "aab", "ba"]),
    ('root ::= item+\nitem ::=\n  "x" |\n  "y"  # a comment: root ::= "z"\n', ["x", "xyx"], ["", "z"]),
    ('\n  root ::= list\n  list ::= "[" (num ("," num)*)? "]"\n  num ::= "-"? [0-9]+\n', ["[]", "[1,-22]"], ["[1,]"]),
    (r'root ::= "\u00e9\x41\n\"\\" [\x30-\x39\]\-a] [^\n"]', ['éA\n"\\3x', 'éA\n"\\-]'], ['éA\n"\\bx', 'éA\n"\\3"']),
    ('root ::= "a"{0} [b-d]{0,0}{2} "e"?', ["", "e"], ["a", "be"]),
    ('root ::= "a"{2,3} "b"{,2} "c"{1,}', ["aac", "aaabbccc"], ["ac", "aab", "aaaac"]),
    ("root ::= 'single' | .", ["single", "é", "\n"], ["", "xx"]),
    ('root ::= fooBar foo-bar foo_bar\nfooBar ::= "1"\nfoo-bar ::= "2"\nfoo_bar ::= "3"', ["123"], ["12"]),
    ('start ::= "only a start"', ["only a start"], [""]),
    ('root ::= start\nstart ::= "x"', ["x"], [""]),
    ('root ::= ("é" | [а-я])+', ["éяé"], ["z"]),
    ('root ::= sum\nsum ::= sum "+" [0-9] | [0-9]', ["1", "1+2+3"], ["+", "1+"]),
]


@pytest.mark.parametrize(("text", "fit", "unfit"), CASES, ids=range(len(CASES)))
def test_grammars_take_what_they_should(text: str, fit: list[str], unfit: list[str]) -> None:
    assert is_ebnf(text)
    matcher = matcher_of(of_grammar(text, {}, "grammar"))
    assert [one for one in fit if not accepts(matcher, one)] == []
    assert [one for one in unfit if accepts(matcher, one)] == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('first ::= "a"', "no rule `root`"),
        ("root ::= other", "'other', which is used and not defined"),
        ('root ::= "a"\n\nroot ::= "b"', "line 3: 'root ::= \"b\"' is defined twice"),
        ('root ::= "open', "is not EBNF"),
        ("root ::= [", "is not EBNF"),
        ("root ::= []", "matches no character"),
        ("root ::= (((", "is not closed"),
        ('root ::= "a"{5,2}', "counts?, in order"),
        ('root ::= "a"{99999999999999999999}', "counts?, in order"),
        ("root ::= *", "not expected here"),
        ('root ::= "a")', "not expected here"),
        ('"a" root ::= "b"', "should begin a rule"),
        (r'root ::= "\ud800"', "no character"),
        (r'root ::= "\UFFFFFFFF"', "no character"),
        ("root ::= " + "(" * 500, "nested more than"),
        ("root ::= " + '"\ud800"', "surrogate"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(text: str, why: str) -> None:
    with pytest.raises(RequestError, match=why) as caught:
        lark_of_ebnf(text, "structured_outputs.grammar")
    assert str(caught.value).startswith("structured_outputs.grammar")
    assert caught.value.param == "structured_outputs"


def test_bombs_are_refused_in_a_moment() -> None:
    laughs = "\n".join(f"a{i} ::= a{i + 1} a{i + 1}" for i in range(60))
    chain = "\n".join(f'c{i} ::= "x" c{i + 1}?' for i in range(5000))
    started = time.process_time()
    for text in (
        f'root ::= a0\n{laughs}\na60 ::= "x"',
        f'root ::= c0\n{chain}\nc5000 ::= "x"',
        "root ::= " + '("x" ' * 90 + ")?" * 90 + " x",
        'root ::= "a"' * 50_000,
    ):
        with pytest.raises(RequestError):
            of_grammar(text, {}, "grammar")
    assert time.process_time() - started < 5


def test_lark_is_told_from_ebnf_and_may_mark_rules_as_inline() -> None:
    lark = '?start: "SELECT " ?column\n?column: /[a-z]+ ::= x/\n'
    assert not is_ebnf(lark)
    matcher = matcher_of(of_grammar('?start: "SELECT " column\n?column: /[a-z]+/\n', {}, "grammar"))
    assert accepts(matcher, "SELECT a")
    with pytest.raises(RequestError, match="column"):
        of_grammar('start: "SELECT " column', {}, "grammar")
    with pytest.raises(RequestError, match="lines"):
        of_grammar("// a\n" * 5000, {}, "grammar")
