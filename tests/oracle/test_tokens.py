import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from oracle.formats.errors import Refusal
from oracle.model import tokenizer as tokens
from oracle.model.checkpoint import Checkpoint

CASES = json.loads((Path(__file__).parents[1] / "golden/tokens.json").read_text(encoding="utf-8"))[
    "cases"
]


@pytest.fixture(scope="session")
def smol(default_checkpoint: Checkpoint) -> tokens.Tokenizer:
    tokenizer = tokens.load(default_checkpoint.folder)
    assert tokenizer is not None
    return tokenizer


def copy(default_checkpoint: Checkpoint, folder: Path, **changes: object) -> tokens.Tokenizer:
    """The default model's tokenizer with parts of its file replaced."""
    value = json.loads((default_checkpoint.folder / "tokenizer.json").read_text(encoding="utf-8"))
    (folder / "tokenizer.json").write_text(json.dumps(value | changes), encoding="utf-8")
    tokenizer = tokens.load(folder)
    assert tokenizer is not None
    return tokenizer


ADDS_ZERO = json.loads(
    processors.TemplateProcessing(
        "<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    ).__getstate__()
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: ascii(case["text"]))
def test_the_default_tokenizer_gives_the_ids_of_an_independent_one_and_the_text_back(
    smol: tokens.Tokenizer, case: dict[str, object]
) -> None:
    assert smol.encode(str(case["text"])) == case["ids"]
    assert smol.decode(case["ids"]) == case["text"]
    assert smol.warning is None


def test_there_are_as_many_cases_as_were_given() -> None:
    assert len(CASES) == 18


def test_special_tokens_are_one_id_each_and_shown(smol: tokens.Tokenizer) -> None:
    assert smol.encode("<|im_start|>user<|im_end|><empty_output>") == [1, 4093, 2, 16]
    assert smol.decode([1, 4093, 2, 16]) == "<|im_start|>user<|im_end|><empty_output>"


@pytest.mark.parametrize(
    ("id", "text"),
    [
        (504, "The"),
        (314, " is"),
        (198, "\n"),
        (100, "t"),
        (0, "<|endoftext|>"),
        (33777, "oji"),
        (10813, "<f0 9f>"),
        (49152, "<49152>"),
    ],
)
def test_a_token_is_its_text_with_its_space_or_its_spelling(
    smol: tokens.Tokenizer, id: int, text: str
) -> None:
    assert smol.token_text(id) == text


def test_a_decoder_that_drops_the_first_space_does_not_drop_it_from_a_shown_token(
    tmp_path: Path,
) -> None:
    inner = Tokenizer(
        models.BPE({"▁": 0, "▁is": 1, "i": 2, "s": 3, "▁i": 4}, [("▁", "i"), ("▁i", "s")])
    )
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = tokens.load(tmp_path)
    assert tokenizer is not None
    assert (tokenizer.decode([1]), tokenizer.token_text(1), tokenizer.token_text(2)) == (
        "is",
        " is",
        "i",
    )


@pytest.fixture
def pieces(tmp_path: Path) -> tokens.Tokenizer:
    """As Llama 2's: words with a sign for the space before them, and bytes for what has no word."""
    words = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "▁the", "▁cat", "▁on", "▁sat", "at", "猫"]
    inner = Tokenizer(
        models.Unigram([(w, -9.0 if w[0] == "<" else -1.0) for w in words], 0, byte_fallback=True)
    )
    inner.add_special_tokens(["<unk>", "<s>"])
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    inner.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = tokens.load(tmp_path)
    assert tokenizer is not None
    return tokenizer


TEXTS = ["the cat on sat", "the 猫 on", "👩‍🔬 the cat 🐈", "  the  cat ", "é\nè", "the \ufffd cat"]
BOTH = pytest.mark.parametrize("kind", ["smol", "pieces"])


@BOTH
@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_a_streamed_text_is_the_whole_one_from_every_place(
    kind: str, text: str, request: pytest.FixtureRequest
) -> None:
    tokenizer: tokens.Tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode(text)
    assert text in tokenizer.decode(ids)
    for prompt in range(len(ids)):
        for end in range(prompt, len(ids) + 1):
            streamed = "".join(tokenizer.stream(ids[:prompt], iter(ids[prompt:end])))
            before, whole = tokenizer.decode(ids[:prompt]), tokenizer.decode(ids[:end])
            assert streamed == whole[len(before) :], (prompt, end)


@BOTH
def test_a_piece_comes_as_soon_as_its_token(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer: tokens.Tokenizer = request.getfixturevalue(kind)
    prompt = tokenizer.encode("the cat")
    ids = tokenizer.encode("the cat on sat")[len(prompt) :]
    assert [next(tokenizer.stream(prompt, iter(ids)))] == [" on"]
    assert list(tokenizer.stream(prompt, ids)) == [" on", " sat"]
    assert list(tokenizer.stream(prompt, [])) == []


def test_a_byte_token_is_shown_as_its_byte(pieces: tokens.Tokenizer) -> None:
    shown = [pieces.token_text(2 + byte) for byte in (0x80, 0xF0, 0x41, 0x0A)]
    assert shown == ["<80>", "<f0>", "A", "\n"]
    assert [pieces.token_text(id) for id in (259, 263, 264, 999)] == [" the", "at", "猫", "<999>"]


def test_a_doubled_first_token_is_said_and_kept(
    default_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    tokenizer = copy(default_checkpoint, tmp_path, post_processor=ADDS_ZERO)
    assert tokenizer.encode("<|endoftext|>The") == [0, 0, 504]
    assert (
        tokenizer.warning
        == "prompt: begins with <|endoftext|> twice (the text has it and the tokenizer adds it); "
        "both are kept"
    )
    assert tokenizer.encode("The") == [0, 504]
    assert tokenizer.warning is None


def test_a_text_that_repeats_itself_is_not_called_doubled(
    default_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    ends = json.loads(
        processors.TemplateProcessing(
            "$A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
        ).__getstate__()
    )
    tokenizer = copy(default_checkpoint, tmp_path, post_processor=ends)
    assert tokenizer.encode("11") == [33, 33, 0]
    assert tokenizer.warning is None


def test_a_files_own_cutting_and_filling_is_switched_off(
    default_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    inner = Tokenizer.from_file(str(default_checkpoint.folder / "tokenizer.json"))
    inner.enable_truncation(3)
    inner.enable_padding(length=9)
    inner.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("The").ids) == 9
    tokenizer = tokens.load(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode("The capital of France is") == [504, 3575, 282, 4649, 314]


def test_no_text_is_refused_even_where_the_tokenizer_would_add_a_token(
    default_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    tokenizer = copy(default_checkpoint, tmp_path, post_processor=ADDS_ZERO)
    with pytest.raises(
        Refusal,
        match=r"^prompt: empty, expected text of one token or more; give some text or token ids$",
    ):
        tokenizer.encode("")
    assert tokenizer.encode(" ") == [0, 216]


def test_a_text_without_tokens_is_refused(default_checkpoint: Checkpoint, tmp_path: Path) -> None:
    tokenizer = copy(
        default_checkpoint,
        tmp_path,
        normalizer={"type": "Strip", "strip_left": True, "strip_right": True},
    )
    with pytest.raises(Refusal, match=r"^prompt: no tokens, expected text of one token"):
        tokenizer.encode("  ")


def test_half_a_character_is_refused(smol: tokens.Tokenizer) -> None:
    with pytest.raises(Refusal, match=r"^prompt: not text \(surrogates not allowed at place 3\)"):
        smol.encode("The\ud83d")


def test_a_folder_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    assert tokens.load(tmp_path) is None


@pytest.mark.parametrize(
    "text", ["", "{", "{}", "[]", "version https://git-lfs.github.com/spec/v1\n"]
)
def test_a_damaged_tokenizer_is_refused_by_its_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(Refusal) as caught:
        tokens.load(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'tokenizer.json'}: not a tokenizer (")
    assert "\n" not in str(caught.value)


def test_ids_that_the_model_has_rows_and_positions_for_are_taken() -> None:
    tokens.check_ids([0, 10, 10], vocab_size=11, max_positions=3)


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([], "tokens: none, expected one id or more; give some text or token ids"),
        (
            [3, 11],
            "tokens: id 11 at place 1, expected 0 to 10; take ids of this model's vocabulary",
        ),
        ([-1], "tokens: id -1 at place 0, expected 0 to 10; take ids of this model's vocabulary"),
        (
            [True],
            "tokens: id True at place 0, expected 0 to 10; take ids of this model's vocabulary",
        ),
        ([2.0], "tokens: id 2.0 at place 0, expected 0 to 10; take ids of this model's vocabulary"),
        (
            [1] * 4,
            "tokens: 4 of them, expected at most 3 (max_position_embeddings); shorten the prompt",
        ),
    ],
)
def test_other_ids_are_refused_by_their_place(ids: list[int], says: str) -> None:
    with pytest.raises(Refusal) as caught:
        tokens.check_ids(ids, vocab_size=11, max_positions=3)
    assert str(caught.value) == says
