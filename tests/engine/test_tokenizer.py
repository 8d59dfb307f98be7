"""Text <-> ids as transformers does it, and what becomes of folders that have no usable tokenizer."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from headrace.engine.hf_tokenizer import HFTokenizer
from headrace.engine.tokenizer import NAMED_TOKENS, Tokenizer
from headrace.errors import ConfigError, RequestError, TokenizerError
from tests.engine.fakes import byte_tokenizer, model_folder
from tests.published import each_tokenizer
from tests.speed import PATIENCE

TEXTS = [
    "",
    "a",
    "Once upon a time, there was a little girl.",
    " Hello world  with  spaces ",
    "日本語テキスト 🙂👩‍👩‍👧 naïve e\u0301 ﬁ İ",
    "<s>hi</s><|im_end|> x <|end|> y<|endoftext|>",
    "\n\n  def f(x):\n\treturn x ** 2  # 12345\r\n",
    "don't . , ! ▁ x ▁y",
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Say the <weather>",
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "where"}}},
        },
    }
]
MESSAGES = [
    {"role": "system", "content": "You <b>are</b> kind"},
    {"role": "user", "content": 'hi "there" é'},
    {"role": "assistant", "content": "ok"},
    {"role": "user", "content": "more"},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folder(tmp_path)


def write_config(folder: Path, **changes: object) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def render_chat(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True, **kwargs: Any,
) -> str:  # fmt: skip
    return tokenizer.template_for(bool(tools)).render(messages, tools, add_generation_prompt, kwargs)


def assert_like_transformers(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours, theirs = Tokenizer.from_folder(folder), transformers.AutoTokenizer.from_pretrained(folder)
    assert ours.vocab_size == len(theirs)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    for text in TEXTS:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, special) == ids
            assert ours.decode(ids, special) == theirs.decode(ids, skip_special_tokens=special)
    if theirs.chat_template:
        for tools, prompt in ((None, True), (None, False), (TOOLS, True)):
            rendered = theirs.apply_chat_template(MESSAGES, tools=tools, add_generation_prompt=prompt, tokenize=False)
            assert render_chat(ours, MESSAGES, tools, prompt) == rendered
            ids = theirs.apply_chat_template(MESSAGES, tools=tools, add_generation_prompt=prompt, return_dict=False)
            assert ours.encode(rendered, add_special_tokens=False) == list(ids)
    assert_methods_like_transformers(HFTokenizer(ours, str(folder)), theirs)


def assert_methods_like_transformers(ours: HFTokenizer, theirs: Any) -> None:
    """What `LLM.get_tokenizer` returns: the same names, defaults and results."""
    for name in (*NAMED_TOKENS, "all_special_tokens", "chat_template", "vocab_size", "name_or_path", "is_fast"):
        assert getattr(ours, name) == getattr(theirs, name), name
    for name in (*(f"{name}_id" for name in NAMED_TOKENS), "all_special_ids"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert len(ours) == len(theirs)
    assert ours.get_vocab() == theirs.get_vocab()
    batch = [theirs.encode(text) for text in TEXTS]
    for text, ids in zip(TEXTS, batch, strict=True):
        assert ours.encode(text) == ids
        assert ours(text) == dict(theirs(text))
        assert ours(text, add_special_tokens=False).input_ids == theirs(text, add_special_tokens=False).input_ids
        assert ours.tokenize(text) == theirs.tokenize(text)
        assert ours.decode(ids) == theirs.decode(ids)
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)
        tokens = ours.convert_ids_to_tokens(ids)
        assert tokens == theirs.convert_ids_to_tokens(ids)
        assert ours.convert_ids_to_tokens(ids, True) == theirs.convert_ids_to_tokens(ids, True)
        assert ours.convert_tokens_to_ids(tokens) == theirs.convert_tokens_to_ids(tokens)
    assert ours(TEXTS) == dict(theirs(TEXTS))
    assert ours.batch_decode(batch) == ours.decode(batch) == theirs.batch_decode(batch)
    assert ours.decode(batch[2][0]) == theirs.decode(batch[2][0])
    assert ours.convert_ids_to_tokens(batch[2][0]) == theirs.convert_ids_to_tokens(batch[2][0])
    assert ours.convert_tokens_to_ids("no such token") == theirs.convert_tokens_to_ids("no such token")
    if theirs.chat_template:
        unfinished = [*MESSAGES[:2], {"role": "assistant", "content": "It is <", "tool_calls": None}]
        for messages in (MESSAGES, [MESSAGES, unfinished]):
            assert ours.apply_chat_template(messages) == dict(theirs.apply_chat_template(messages))
            for options in (
                {"tokenize": False},
                {"return_dict": False, "add_generation_prompt": True},
                {"tokenize": False, "chat_template": "{{ messages[0].role }}{{ mood }}", "mood": "!"},
                {"tokenize": False, "tools": TOOLS},
                {"tokenize": False, "continue_final_message": True},
            ):
                assert ours.apply_chat_template(messages, **options) == theirs.apply_chat_template(messages, **options)


@each_tokenizer
def test_real_tokenizers_equal_transformers(folder: Path) -> None:
    assert_like_transformers(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"add_bos_token": False, "pad_token": "<pad>"},
        {"additional_special_tokens": ["<extra>"], "image_token": "<image>"},
        {
            "bos_token": {
                "__type": "AddedToken",
                "content": "<s>",
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
            }
        },
        {"added_tokens_decoder": {"300": {"content": "new word", "special": False, "normalized": True}}},
    ],
    ids=lambda changes: "+".join(changes) or "plain",
)
def test_tokenizer_config_equals_transformers(folder: Path, changes: dict[str, object]) -> None:
    write_config(folder, **changes)
    assert_like_transformers(folder)


def test_bos_comes_from_the_post_processor_or_the_config(folder: Path) -> None:
    assert Tokenizer.from_folder(folder).encode("") == []
    write_config(folder, add_bos_token=True, add_eos_token=True)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("") == [1, 2]
    assert tokenizer.encode("", add_special_tokens=False) == []
    backend = byte_tokenizer()
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    backend.save(str(folder / "tokenizer.json"))
    assert_like_transformers(folder)
    assert Tokenizer.from_folder(folder).encode("") == [2]  # the file's own post-processor wins


def test_a_rendered_template_gets_no_second_bos(folder: Path) -> None:
    write_config(folder, add_bos_token=True, chat_template="{{ bos_token }}{{ messages[0].content }}")
    tokenizer = Tokenizer.from_folder(folder)
    ids = tokenizer.encode(render_chat(tokenizer, [{"role": "user", "content": "x"}]), add_special_tokens=False)
    assert ids.count(1) == 1


def test_token_text_keeps_spaces_and_marks_parts_of_characters(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    space, *accent = tokenizer.encode(" é")
    assert tokenizer.token_text(space) == " "
    assert [tokenizer.token_text(part) for part in accent] == ["\ufffd", "\ufffd"]
    assert b"".join(map(tokenizer.token_bytes, accent)).decode() == "é"
    assert tokenizer.token_text(9999) == ""


def test_half_a_character_in_a_prompt_is_the_requests_fault(folder: Path) -> None:
    with pytest.raises(RequestError, match="UTF-8"):
        Tokenizer.from_folder(folder).encode("\ud800")


class TestBrokenFolders:
    def test_no_tokenizer(self, tmp_path: Path) -> None:
        with pytest.raises(TokenizerError, match=r"no tokenizer\.json.*--skip-tokenizer-init"):
            Tokenizer.from_folder(tmp_path)

    @pytest.mark.parametrize("content", ["", "{", "[]", '{"model": {"type": "BPE"}}', "\x00\x01"])
    def test_unusable_tokenizer_json(self, folder: Path, content: str) -> None:
        (folder / "tokenizer.json").write_text(content)
        with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
            Tokenizer.from_folder(folder)

    def test_unusable_tokenizer_config(self, folder: Path) -> None:
        (folder / "tokenizer_config.json").write_text("[1]")
        with pytest.raises(TokenizerError, match="must hold a JSON object"):
            Tokenizer.from_folder(folder)


class TestChatTemplate:
    """Where templates come from, and that none can harm the server."""

    def render(self, folder: Path, template: str, **kwargs: object) -> str:
        return render_chat(Tokenizer.from_folder(folder, template), [{"role": "user", "content": "<hi>"}], **kwargs)

    def test_named_templates(self, folder: Path) -> None:
        named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
        write_config(folder, chat_template=named)
        tokenizer = Tokenizer.from_folder(folder)
        assert render_chat(tokenizer, []) == "plain"
        assert render_chat(tokenizer, [], tools=TOOLS) == "tools"

    def test_a_jinja_file_wins_over_the_config(self, folder: Path) -> None:
        (folder / "chat_template.jinja").write_text("from the file")
        assert render_chat(Tokenizer.from_folder(folder), []) == "from the file"

    def test_an_override_is_a_file_or_a_text(self, folder: Path, tmp_path: Path) -> None:
        path = tmp_path / "mine.jinja"
        path.write_text("{{ messages[0].content }} from mine")
        assert self.render(folder, str(path)) == "<hi> from mine"
        assert self.render(folder, "{{ messages[0].content }}!") == "<hi>!"
        with pytest.raises(ConfigError, match="neither a readable file nor a template"):
            Tokenizer.from_folder(folder, "no/such/file")
        with pytest.raises(ConfigError, match="not a valid jinja template"):
            Tokenizer.from_folder(folder, "{% if %}")

    def test_no_template_and_a_broken_one_are_said_when_needed(self, folder: Path) -> None:
        write_config(folder, chat_template=None)
        with pytest.raises(RequestError, match="no chat template") as caught:
            render_chat(Tokenizer.from_folder(folder), [])
        assert caught.value.param == "messages"
        write_config(folder, chat_template="{% if %}")
        with pytest.raises(RequestError, match="its chat template is broken"):
            render_chat(Tokenizer.from_folder(folder), [])

    def test_what_templates_of_models_use(self, folder: Path) -> None:
        template = (
            "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
            "{% generation %}{{ eos_token }}{% endgeneration %}{{ {'a': '<é>'} | tojson }}{{ strftime_now('%%') }}"
            "{{ thinking }}{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}"
        )
        assert self.render(folder, template, thinking="yes") == '01</s>{"a": "<é>"}%yes2'

    def test_raise_exception_is_the_requests_fault(self, folder: Path) -> None:
        with pytest.raises(RequestError, match="roles must alternate"):
            self.render(folder, "{{ raise_exception('roles must alternate') }}")

    @pytest.mark.parametrize(
        "template",
        ["{{ messages.nothing.more }}", "{{ 1 / 0 }}", "{{ messages[0].content + 1 }}", "{{ [] | first | tojson }}"],
    )
    def test_failures_are_the_requests_fault(self, folder: Path, template: str) -> None:
        with pytest.raises(RequestError, match="chat template"):
            self.render(folder, template)

    @pytest.mark.parametrize("name", ["messages", "tools", "chat_template", "tokenize", "eos_token", "__class__"])
    def test_reserved_kwargs(self, folder: Path, name: str) -> None:
        kwargs = {name: "mine"}
        tokenizer = Tokenizer.from_folder(folder)
        with pytest.raises(RequestError) as caught:
            tokenizer.template_for(False).render([], None, True, kwargs)
        assert caught.value.param == "chat_template_kwargs"

    @pytest.mark.parametrize(
        "template",
        [
            "{{ messages.__class__ }}",
            "{{ ''.__class__.__mro__ }}",
            "{{ messages.append(1) }}",
            "{{ cycler.__init__.__globals__ }}",
            "{{ 'a' * 10**9 }}",
            "{{ [0] * 10**9 }}",
            "{{ 9 ** (9 ** 9) }}",
            "{{ '%999999999d' % 1 }}",
            "{{ range(10**9) }}",
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "{% for i in range(99999) %}{% for j in range(999) %}{{ messages[0].content }}{% endfor %}{% endfor %}",
            "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        ],
    )
    def test_no_way_out_and_no_way_to_hang(self, folder: Path, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("headrace.engine.chat_template.MAX_RENDER_SECONDS", 0.3)
        started = time.monotonic()
        try:
            text = self.render(folder, template)
        except RequestError:
            text = ""
        assert text == "" or template == "{{ messages.__class__ }}"
        assert time.monotonic() - started < PATIENCE  # it would be hours

    @pytest.mark.parametrize(
        ("template", "text"),
        [
            ("{{ messages[0].content.split('</think>')[-1] }}", "</think>" * 2**18),
            ("{{ messages[0].content.split() | length }}", "a " * 2**18),
            ("{{ messages[0].content.splitlines() | length }}", "\n" * 2**19),
            ("{{ messages | tojson }}", "a" * (2**22 + 1)),
        ],
    )
    def test_no_single_step_is_long(self, folder: Path, template: str, text: str) -> None:
        """Splitting and writing JSON of a long text hold Python's lock, and so the event loop, in a thread too."""
        tokenizer = Tokenizer.from_folder(folder, template)
        with pytest.raises(RequestError, match="more than"):
            render_chat(tokenizer, [{"role": "user", "content": text}])
        render_chat(tokenizer, [{"role": "user", "content": text[:1000]}])

    def test_output_is_bounded(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("headrace.engine.chat_template.MAX_RENDERED_CHARS", 1000)
        with pytest.raises(RequestError, match="more than 1000 characters"):
            self.render(folder, "{% for i in range(2000) %}x{% endfor %}")


def test_the_fake_vocabulary_is_bytes() -> None:
    assert byte_tokenizer().encode("é").ids == [byte_tokenizer().token_to_id("Ã"), byte_tokenizer().token_to_id("©")]
