"""Every tokenizer writes text down exactly, and never takes plain text for end-of-text."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from podling.config import DataConfig
from podling.data.corpus import find_sources
from podling.data.tokenizer import Tokenizer
from podling.data.tokenizer_spec import byte_alphabet
from podling.data.vocabulary import build_tokenizer, bytes_tokenizer, from_path
from podling.errors import InputError

JAPANESE = "吾輩は猫である。名前はまだ無い。\nどこで生れたかとんと見当がつかぬ。🐈\u3000「ニャー」"
EOT = "<|endoftext|>"
SAMPLE = f"{JAPANESE} It's a test: {EOT} is plain here, 123 +-*/.\r\n\t  end  "


@pytest.fixture(scope="module")
def tokenizers_by_kind(tmp_path_factory):
    path = tmp_path_factory.mktemp("t") / "text.txt"
    path.write_bytes((SAMPLE * 30).encode())
    made = {}
    for kind in ("bpe", "char", "bytes"):
        config = DataConfig(paths=(str(path),), tokenizer=kind, vocab_size=300)
        made[kind] = build_tokenizer(config, find_sources(config))
    return made


KINDS = ["bpe", "char", "bytes"]


@pytest.mark.parametrize("kind", KINDS)
def test_text_comes_back_exactly_and_bytes_are_counted(tokenizers_by_kind, kind):
    tokenizer = tokenizers_by_kind[kind]
    ids = tokenizer.encode(SAMPLE)
    assert tokenizer.decode(ids) == SAMPLE
    assert tokenizer.decode_bytes(ids) == SAMPLE.encode()
    lengths = tokenizer.token_bytes()
    assert len(lengths) == tokenizer.vocab_size
    assert sum(lengths[token] for token in ids) == len(SAMPLE.encode())
    assert lengths[tokenizer.eot_id] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_plain_text_never_becomes_end_of_text(tokenizers_by_kind, kind):
    """A document that quotes the token must not end there; by default the library would take it for the token."""
    tokenizer = tokenizers_by_kind[kind]
    assert tokenizer.eot_id == tokenizer.vocab_size - 1
    assert tokenizer.eot_id not in tokenizer.encode(f"a{EOT}t\n{EOT}\n")
    assert tokenizer._backend.token_to_id(EOT) == tokenizer.eot_id
    reloaded = Backend.from_str(tokenizer._backend.to_str())
    assert tokenizer.eot_id in reloaded.encode(EOT).ids, "the test would not notice"


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded_is_the_same(tokenizers_by_kind, kind, tmp_path):
    tokenizer = tokenizers_by_kind[kind]
    tokenizer.save(tmp_path / "run" / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "run" / "tokenizer.json")
    assert loaded.fingerprint == tokenizer.fingerprint
    assert (loaded.eot_id, loaded.vocab_size, loaded.family) == (
        tokenizer.eot_id,
        tokenizer.vocab_size,
        tokenizer.family,
    )
    assert loaded.encode(SAMPLE) == tokenizer.encode(SAMPLE)
    assert loaded.encode(EOT) == tokenizer.encode(EOT)


@pytest.mark.parametrize("kind", ["char", "bytes"])
def test_the_fast_path_equals_the_saved_file(tokenizers_by_kind, kind):
    """Characters and bytes are looked up in NumPy; what others load from tokenizer.json must give the same ids."""
    tokenizer = tokenizers_by_kind[kind]
    assert tokenizer._backend.encode(SAMPLE, add_special_tokens=False).ids == tokenizer.encode(SAMPLE)
    assert tokenizer._backend.decode(tokenizer.encode(SAMPLE)) == SAMPLE


@given(text=st.text())
def test_byte_level_vocabularies_write_anything(tokenizers_by_kind, text):
    for kind in ("bpe", "bytes"):
        tokenizer = tokenizers_by_kind[kind]
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert sum(tokenizer.token_bytes()[token] for token in ids) == len(text.encode())


@given(ids=st.lists(st.integers(0, 299)))
def test_any_ids_decode_to_the_bytes_they_stand_for(tokenizers_by_kind, ids):
    tokenizer = tokenizers_by_kind["bpe"]
    data = tokenizer.decode_bytes(ids)
    assert len(data) == sum(tokenizer.token_bytes()[token] for token in ids)
    assert tokenizer.decode(ids) == data.decode(errors="replace")


def test_ids_out_of_range_are_refused(tokenizers_by_kind):
    for bad in (-1, 300):
        with pytest.raises(InputError, match=f"token id {bad} is out of range: ids run from 0 to 299"):
            tokenizers_by_kind["bpe"].decode([1, bad])


def test_an_unknown_character_is_named(tokenizers_by_kind):
    with pytest.raises(InputError, match=r"'ζ' \(U\+03B6, at position 2\) is not in the vocabulary\n.*--tokenizer bpe"):
        tokenizers_by_kind["char"].encode("  ζ")


def test_the_byte_alphabet_is_the_library_s():
    assert sorted(byte_alphabet().values()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert byte_alphabet()[32] == "Ġ"
    assert [bytes_tokenizer().encode(chr(i))[0] for i in range(128)] == list(range(128))


def save(tmp_path, backend, change=lambda spec: None):
    spec = json.loads(backend.to_str())
    change(spec)
    path = tmp_path / "any" / "tokenizer.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(spec))
    return path


def byte_level(eot="</s>", **model):
    """Ids run against the bytes, so that the short cut for bytes is not taken."""
    backend = Backend(models.BPE(vocab={s: 255 - b for b, s in byte_alphabet().items()}, merges=[], **model))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([eot])
    return backend


def test_any_tokenizer_json(tmp_path):
    """Its own name for end-of-text is found, and a length limit or padding it carries does not touch the text."""
    backend = byte_level()
    backend.enable_truncation(5)
    backend.enable_padding(length=9)
    tokenizer = Tokenizer.load(save(tmp_path, backend))
    assert (tokenizer.name, tokenizer.eot_id, tokenizer.family) == ("any", 256, "gpt2")
    assert tokenizer.encode("longer than five") == [255 - byte for byte in b"longer than five"]
    assert tokenizer.encode("ab") == [255 - byte for byte in b"ab"]
    assert from_path(str(tmp_path / "any")).fingerprint == tokenizer.fingerprint


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not a Hugging Face tokenizer.json"),
        ('{"vocab": {}}', "is not a Hugging Face tokenizer.json"),
        ("\xff", "is not a Hugging Face tokenizer.json"),
    ],
)
def test_a_wrong_tokenizer_json(tmp_path, content, message):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(InputError, match=message):
        Tokenizer.load(tmp_path / "tokenizer.json")


def test_a_tokenizer_without_end_of_text_or_with_dropout_is_refused(tmp_path):
    with pytest.raises(InputError, match="has no end-of-text token\n.*added_tokens"):
        Tokenizer.load(save(tmp_path, byte_level(eot="<pad>")))
    with pytest.raises(InputError, match="uses BPE dropout"):
        Tokenizer.load(save(tmp_path, byte_level(dropout=0.1)))
    with pytest.raises(InputError, match="cannot be read"):
        Tokenizer.load(tmp_path / "none.json")


def test_where_text_may_be_cut_is_only_claimed_where_it_is_known(tmp_path):
    def family(change):
        backend = byte_level()
        change(backend)
        return Tokenizer.load(save(tmp_path, backend)).family

    def pre(value):
        return lambda backend: setattr(backend, "pre_tokenizer", value)

    from tokenizers import AddedToken, Regex

    from podling.data.tokenizer_spec import GPT2_PATTERN, WORD_PATTERNS

    def split(pattern, behavior="isolated"):
        steps = [pre_tokenizers.Split(Regex(pattern), behavior), pre_tokenizers.ByteLevel(False, use_regex=False)]
        return pre(pre_tokenizers.Sequence(steps))

    assert family(lambda backend: None) == "gpt2"
    assert family(split(GPT2_PATTERN)) == "gpt2"
    assert family(split(WORD_PATTERNS[0])) == "words"
    assert family(split(r"\d+")) == "never"
    assert family(split(GPT2_PATTERN, "removed")) == "never"
    assert family(pre(pre_tokenizers.ByteLevel(add_prefix_space=True))) == "never"
    assert family(pre(pre_tokenizers.ByteLevel(False, use_regex=False))) == "never"
    assert family(pre(pre_tokenizers.Metaspace())) == "never"
    assert family(lambda backend: setattr(backend, "normalizer", normalizers.NFC())) == "never"
    assert family(lambda backend: backend.add_tokens([AddedToken("a b", normalized=False)])) == "never"


def test_a_byte_vocabulary_has_no_unknown_whatever_its_file_says(tmp_path):
    """Files of GPT-2 name end-of-text as their unknown token: counting it would count nothing real."""
    assert Tokenizer.load(save(tmp_path, byte_level(eot=EOT, unk_token=EOT))).unk_id is None


def test_words_that_a_vocabulary_lacks_are_known_as_such(tmp_path):
    backend = Backend(models.WordLevel({"[UNK]": 0, "hello": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["[SEP]"])
    tokenizer = Tokenizer.load(save(tmp_path, backend))
    assert (tokenizer.unk_id, tokenizer.token_bytes(), tokenizer.family) == (0, None, "never")
    assert tokenizer.encode("hello there") == [1, 0]


@pytest.mark.parity
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_what_is_saved(tokenizers_by_kind, kind, tmp_path):
    from transformers import PreTrainedTokenizerFast

    tokenizer = tokenizers_by_kind[kind]
    tokenizer.save(tmp_path / "tokenizer.json")
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    text = SAMPLE.replace(EOT, "")
    assert theirs.encode(text, add_special_tokens=False) == tokenizer.encode(text)
    assert theirs.decode(tokenizer.encode(text), clean_up_tokenization_spaces=False) == text
    assert theirs.encode(EOT) == [tokenizer.eot_id]
