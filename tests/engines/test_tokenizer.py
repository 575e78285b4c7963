"""The tokenizer as services see it."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from asyncrl.engines.builtin.characters import character_tokenizer
from asyncrl.engines.tokenizer import HfTokenizer
from asyncrl.errors import UserError
from tests.models import tiny_model

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


def test_text_is_encoded_as_it_stands_and_decoded_back(folder):
    tokenizer = HfTokenizer(folder)
    ids = tokenizer.encode_prompt("1+2+3=")
    assert len(ids) == 6
    assert tokenizer.decode(ids) == "1+2+3="
    assert tokenizer.decode([*ids, 1]) == "1+2+3="


@pytest.mark.parametrize("text", ["1+2+3=", "", " two  spaces", "<eos>1", "é ẞ 漢 \U0001f600", "1" * 500])
def test_text_has_the_ids_that_tokenizer_json_gives_it(folder, text):
    own = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert HfTokenizer(folder).encode_prompt(text) == own.encode(text).ids


def test_a_folder_that_names_no_generic_class_has_its_model_types_own_tokenizer(tmp_path):
    folder = tiny_model(tmp_path)
    said = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**said, "tokenizer_class": "Qwen2Tokenizer"}))
    assert type(HfTokenizer(folder)._tokenizer) is type(AutoTokenizer.from_pretrained(folder))


def test_a_text_is_neither_cut_nor_padded_whatever_the_tokenizer_was_saved_with(tmp_path):
    own = character_tokenizer()
    own.backend_tokenizer.enable_truncation(3)
    own.backend_tokenizer.enable_padding(length=16)
    own.save_pretrained(tmp_path)
    assert len(HfTokenizer(tmp_path).encode_prompt("1+2+3=")) == 6


def test_a_tokenizer_with_an_encoding_of_its_own_keeps_it(folder, monkeypatch):
    own = HfTokenizer(folder)._tokenizer
    monkeypatch.setattr(type(own), "encode", lambda self, text: [7, 7], raising=False)
    assert HfTokenizer(folder).encode_prompt("1+2+3=") == [7, 7]


def test_messages_go_through_the_chat_template_with_the_generation_prompt(tmp_path):
    own = character_tokenizer()
    own.chat_template = TEMPLATE
    own.save_pretrained(tmp_path)
    tokenizer = HfTokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode_prompt([{"role": "user", "content": "hi"}])) == "user:hi\nassistant:"


def test_messages_without_a_chat_template_are_refused(folder):
    with pytest.raises(UserError, match="no chat template"):
        HfTokenizer(folder).encode_prompt([{"role": "user", "content": "hi"}])


def test_every_end_token_counts_those_of_the_generation_configuration_too(tmp_path):
    folder = tiny_model(tmp_path)
    assert HfTokenizer(folder).eos_token_ids == (1,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7, 9]}))
    assert HfTokenizer(folder).eos_token_ids == (1, 7, 9)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"model\.tokenizer"):
        HfTokenizer(tmp_path)
