"""Text comes whole: never half a character, never part of a stop string, and in the end what decoding all gives."""

import random
import time

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.detokenizer import Detokenizer, StopMatcher, text_stream
from headrace.engine.tokenizer import Tokenizer
from headrace.sampling_params import SamplingParams
from tests.engine.fakes import EOS, byte_tokenizer
from tests.published import tokenizer_folder
from tests.sampled import some_of
from tests.speed import PATIENCE

TEXTS = ["Hello, world!", " a  b", "naïve 日本語 🙂👩‍👩‍👧 done", "🙂", "\n\tx", "ends in half: é"]


def sentencepiece_like() -> Tokenizer:
    """A few words, and bytes for the rest, as in Llama 2."""
    words = ["▁", "▁Hello", ",", "▁world", "!", "▁a", "▁b", "a", "b", "x", "n", "o", "d", "e", "s", "i", "h", "l", "f"]
    words += [":", "▁done", "t", "v"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    for word in words:
        vocab[word] = len(vocab)
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    backend.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"}, {})


def metaspace() -> Tokenizer:
    """A decoder that looks at the first token differently, so that text is decoded by windows."""
    backend = sentencepiece_like().backend
    backend.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.ByteFallback(), tokenizers.decoders.Metaspace(prepend_scheme="first")]
    )
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"}, {})


TOKENIZERS = {
    "byte level": Tokenizer(byte_tokenizer(), {"eos_token": "</s>"}, {}),
    "byte fallback": sentencepiece_like(),
    "windows": metaspace(),
}
BYTES = TOKENIZERS["byte level"]


@pytest.fixture(params=list(TOKENIZERS))
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return TOKENIZERS[request.param]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_add_up_to_the_whole_and_hold_no_half_characters(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    stream = text_stream(tokenizer, [], tokenizer.special_ids)
    pieces = [stream.feed(token_id) for token_id in ids]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + stream.finish() == tokenizer.decode(ids)
    assert tokenizer.decode(ids).strip() == text.strip()


def test_an_incomplete_character_shows_only_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🙂")[:-1]
    stream = text_stream(tokenizer, [], tokenizer.special_ids)
    assert not any("\ufffd" in stream.feed(token_id) for token_id in ids)
    assert stream.finish().endswith("\ufffd")


def test_output_continues_the_prompt(tokenizer: Tokenizer) -> None:
    """A leading space that `decode` takes off a whole text stays within one, so that prompt + output is the text."""
    prompt, output = tokenizer.encode("Hello,"), tokenizer.encode("Hello, world")[len(tokenizer.encode("Hello,")) :]
    stream = text_stream(tokenizer, prompt, tokenizer.special_ids)
    text = "".join(stream.feed(token_id) for token_id in output) + stream.finish()
    assert text == " world"
    assert tokenizer.decode(prompt + output) == tokenizer.decode(prompt) + text


def test_after_nothing_but_special_tokens_the_text_begins() -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    stream = text_stream(tokenizer, [1], tokenizer.special_ids)
    assert "".join(stream.feed(token_id) for token_id in tokenizer.encode("Hello")) == "Hello"


def test_a_prompt_may_end_within_a_character() -> None:
    ids = BYTES.encode("🙂")
    stream = text_stream(BYTES, ids[:2], BYTES.special_ids)
    assert "".join(stream.feed(token_id) for token_id in ids[2:]) == "🙂"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 262), max_size=24), st.booleans())
def test_any_bytes_decode_as_the_tokenizer_does(ids: list[int], skip: bool) -> None:
    params = SamplingParams(skip_special_tokens=skip)
    detokenizer = Detokenizer(BYTES, [], params)
    text = "".join(detokenizer.append([token_id]).text for token_id in ids) + detokenizer.finish()
    assert text == BYTES.decode(ids, skip)


@pytest.mark.parametrize("name", some_of(["qwen3", "mistral-v3", "phi3-mini", "gpt-oss"], 2))
def test_random_ids_of_real_tokenizers(name: str) -> None:
    tokenizer, choose = Tokenizer.from_folder(tokenizer_folder(name)), random.Random(0)
    single_bytes = {i for i in range(tokenizer.vocab_size) if (piece := tokenizer.pieces.get(i)) and piece.is_byte}
    for _ in range(200):
        ids = [choose.randrange(tokenizer.vocab_size + 3) for _ in range(12)]
        ids = [token_id for token_id in ids if token_id not in single_bytes]  # stray ones are no text
        detokenizer = Detokenizer(tokenizer, [], SamplingParams())
        assert "".join(detokenizer.append([i]).text for i in ids) + detokenizer.finish() == tokenizer.decode(ids)


class TestStopStrings:
    def run(self, text: str, step: int = 1, **params: object) -> tuple[str, int, str | None]:
        """Feeds the bytes of `text`, `step` tokens at a time; returns text, tokens kept and the stop string."""
        detokenizer = Detokenizer(BYTES, [], SamplingParams(max_tokens=None, **params))  # type: ignore[arg-type]
        ids = BYTES.encode(text)
        found, kept = "", 0
        for start in range(0, len(ids), step):
            result = detokenizer.append(ids[start : start + step])
            found += result.text
            kept += result.num_kept
            if result.stop is not None:
                return found, kept, result.stop
        return found + detokenizer.finish(), kept, None

    @pytest.mark.parametrize("step", [1, 2, 3, 100])
    def test_the_token_in_which_it_completes_is_the_last_one_kept(self, step: int) -> None:
        assert self.run("one STOP two", step, stop="STOP") == ("one ", 8, "STOP")
        assert self.run("one STOP two", step, stop="STOP", include_stop_str_in_output=True) == ("one STOP", 8, "STOP")

    def test_the_first_to_complete_wins_and_of_two_the_longer(self) -> None:
        assert self.run("abcdef", stop=["def", "cd"])[::2] == ("ab", "cd")
        assert self.run("abcdef", stop=["cd", "bcd"])[::2] == ("a", "bcd")

    def test_text_is_held_back_only_while_it_could_become_a_stop(self) -> None:
        detokenizer = Detokenizer(BYTES, [], SamplingParams(stop=["\n\nHuman:"]))
        texts = [detokenizer.append(BYTES.encode(part)).text for part in ("a", "\n", "\n", "Hum", "us", "\n")]
        assert texts == ["a", "", "", "", "\n\nHumus", ""]
        assert detokenizer.finish() == "\n"

    def test_overlapping_beginnings(self) -> None:
        assert self.run("aaab", stop="aab") == ("a", 4, "aab")
        assert self.run("ababac", stop="abac") == ("ab", 6, "abac")

    def test_within_characters_of_several_tokens(self) -> None:
        assert self.run("x日本y", stop="本") == ("x日", 7, "本")

    def test_min_tokens(self) -> None:
        assert self.run("a.b.c.d", stop=".", min_tokens=3) == ("a.b", 4, ".")
        assert self.run("a.b", stop=".", min_tokens=3) == ("a.b", 3, None)
        assert self.run("a.b", stop=".", min_tokens=2) == ("a.b", 3, None)

    def test_a_stop_that_began_before_min_tokens(self) -> None:
        assert self.run("abc", stop="bc", min_tokens=2) == ("a", 3, "bc")

    @settings(max_examples=300, deadline=None)
    @given(
        st.text("ab", max_size=30),
        st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
        st.integers(1, 7),
    )
    def test_against_a_plain_search(self, text: str, stops: list[str], step: int) -> None:
        ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
        expected = (text, len(text), None)
        if ends:
            end, _, stop = min(ends)
            expected = (text[: end - len(stop)], end, stop)
        assert self.run(text, step, stop=stops) == expected

    def test_long_outputs_cost_no_more_a_token(self) -> None:
        matcher = StopMatcher(["a" * 255 + "b"])
        started = time.monotonic()
        for _ in range(20000):
            matcher.feed("aaaa", enabled=True)
        assert matcher.num_held == 255
        assert time.monotonic() - started < PATIENCE  # quadratic would be minutes


class TestEnds:
    def test_a_stop_token_writes_no_text_unless_included(self) -> None:
        ids = BYTES.encode("hi!")
        silent = Detokenizer(BYTES, [], SamplingParams())
        assert silent.append(ids, last_is_stop_token=True) == ("hi", 3, None)
        loud = Detokenizer(BYTES, [], SamplingParams(include_stop_str_in_output=True))
        assert loud.append(ids, last_is_stop_token=True).text == "hi!"

    def test_special_tokens_are_skipped_or_not(self) -> None:
        ids = [*BYTES.encode("a"), EOS, *BYTES.encode("b")]
        assert Detokenizer(BYTES, [], SamplingParams()).append(ids).text == "ab"
        assert Detokenizer(BYTES, [], SamplingParams(skip_special_tokens=False)).append(ids).text == "a</s>b"

    def test_some_special_tokens_may_be_kept(self, tokenizer: Tokenizer) -> None:
        """As for a parser, whose markup consists of some of them."""
        eos = tokenizer.eos_token_id
        assert eos is not None
        others = tokenizer.special_ids - {eos}
        ids = [*others, *tokenizer.encode("a"), *others, eos, *tokenizer.encode("b"), *others]
        detokenizer = Detokenizer(tokenizer, [], SamplingParams(), kept=frozenset((eos,)))
        text = "".join(detokenizer.append([token_id]).text for token_id in ids) + detokenizer.finish()
        assert [part.strip() for part in text.split("</s>")] == ["a", "b"]
