"""Shell text as words: quotes, comments and redirections as a shell has them; what it fills in is kept to be typed."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.advice.explain.shell_words import as_typed, commands, expanded, is_unexpanded, is_variable, plain
from headrace.errors import ConfigError

SPLIT = [
    ("a b\tc", [["a", "b", "c"]]),
    ("a 'b c' \"d e\" f\\ g", [["a", "b c", "d e", "f g"]]),
    ("a; b && c | d || e & (f)\ng", [["a"], ["b"], ["c"], ["d"], ["e"], ["f"], ["g"]]),
    ("a '' b", [["a", "", "b"]]),
    ("a \\\n b \\  \n c", [["a", "b", "c"]]),
    ("a \\\r\n b\r\nc", [["a", "b"], ["c"]]),
    ("a # b 'c\nd e#f", [["a"], ["d", "e#f"]]),
    ("a > b 2>&1 c", [["a", "c"]]),
    ("a >b 2> /dev/null &> \"$LOG\" d", [["a", "d"]]),
    ("a < in > 'out file' b", [["a", "b"]]),
    ("a 'x > y' \"z # 1\"", [["a", "x > y", "z # 1"]]),
    ("a <your model> b", [["a", "./your-model", "b"]]),
    ("a \"b \\\" \\\\ \\$c \\d\" '\\\\'", [["a", 'b " \\ $c \\d', "\\\\"]]),
    ("a \"b\nc\"", [["a", "b\nc"]]),
    ("$ a 5$ b$", [["$", "a", "5$", "b$"]]),
    ("a $'b c'", [["a", "b c"]]),
    ("a b\\", [["a", "b"]]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), SPLIT, ids=[text for text, _ in SPLIT])
def test_words(text: str, expected: list[list[str]]) -> None:
    assert list(commands(text)) == expected


OPEN = [
    ("$A", "$A", '"$A"', "$A"),
    ('"$A"', "$A", '"$A"', '"$A"'),
    ("${A:-x y}", "${A:-x y}", '"${A:-x y}"', "${A:-x y}"),
    ("$(b -L | wc -l)", "$(b -L | wc -l)", '"$(b -L | wc -l)"', "$(b -L | wc -l)"),
    ("`b -L`", "`b -L`", '"`b -L`"', "`b -L`"),
    ("$((1 + (2)))", "$((1 + (2)))", '"$((1 + (2)))"', "$((1 + (2)))"),
    ("$(b ')' \")\")", "$(b ')' \")\")", '"$(b \')\' ")")"', "$(b ')' \")\")"),
    ('"$@"', "$@", '"$@"', '"$@"'),
    ("$A/b", "$A/b", '"$A/b"', '"$A/b"'),
    ("'a $b'$C", "a $b$C", '"a \\$b$C"', '"a \\$b$C"'),
    ("${A[@]}", "${A[@]}", '"${A[@]}"', "${A[@]}"),
]


@pytest.mark.parametrize(("text", "shown", "quoted", "bare"), OPEN, ids=[row[0] for row in OPEN])
def test_what_the_shell_fills_in_stays(text: str, shown: str, quoted: str, bare: str) -> None:
    ((word, _),) = commands(f"{text} end")
    assert is_unexpanded(word)
    assert (plain(word), as_typed(word), as_typed(word, splits=True)) == (shown, quoted, bare)


@pytest.mark.parametrize("text", ["'$A'", "\\$A", "'`a`'", '"\\$(a)"', "$", "a$", "$(a", "${a", "`a", "$/"])
def test_what_it_does_not_fill_in_is_a_word_like_others(text: str) -> None:
    words = next(commands(text))
    assert not any(map(is_unexpanded, words))


@pytest.mark.parametrize(
    ("word", "expected"), [("~/a b", "~/'a b'"), ("~/a", "~/a"), ("~", "'~'"), ("a'b", "'a'\"'\"'b'")]
)
def test_plain_words_are_typed_in_quotes_where_they_need_them(word: str, expected: str) -> None:
    assert as_typed(word) == expected


def test_variables_that_are_known_are_filled_in() -> None:
    ((bare, quoted, other, joined),) = commands('$A "${A}" ${A:-1} x$A')
    values = {"A": "-tp 2"}
    assert expanded(bare, values) == ["-tp", "2"]
    assert expanded(quoted, values) == ["-tp 2"]
    assert expanded(other, values) == [other]
    assert expanded(joined, values) == ["x-tp 2"]
    assert expanded(bare, {}) == [bare]
    assert [is_variable(word) for word in (bare, quoted, other, joined, "$A")] == [True, True, False, False, False]


@pytest.mark.parametrize("text", ["a 'b", 'a "b'])
def test_a_quote_without_end(text: str) -> None:
    with pytest.raises(ConfigError, match="no closing quotation"):
        list(commands(text))


PIECES = ["a", " ", "'", '"', "\\", "$", "$A", "${A}", "$(", ")", "`", "{", "}", "b c", "#", "~/", "<", ">", "\n", "é",
          "&"]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=12))
def test_typed_words_are_the_same_words(pieces: list[str]) -> None:
    try:
        found = list(commands("".join(pieces)))
    except ConfigError:
        return
    for words in found:
        again = next(commands(" ".join(map(as_typed, words))), [])
        assert list(map(plain, again)) == [plain(word) for word in words if word != "\\"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize(
    "text",
    [
        "$A ${B:-x y} $(echo 1 2 | wc -w) `echo q` \"$A\" '$A' \\$A",
        '"a \'$A\' \\" b" \'say "$A"\'"$A" ~/x',
        '$((1 + 2)) "$(echo "in $A")" ${#A} "${A%e}"',
    ],
)
def test_a_shell_reads_the_typed_words_as_it_reads_the_text(text: str) -> None:
    def run(line: str) -> str:
        script = f"A='one two'; HOME=/h; printf '%s\\n' {line}"
        return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout

    ((*words,),) = commands(text)
    assert run(" ".join(as_typed(word, splits=True) for word in words)) == run(text)
