"""Makes the fixtures of tests/data/tokenizers: two tiny tokenizer.json, and their encodings of some texts.

    python tests/hf/make_tokenizers.py [FOLDER]     writes FOLDER/{bpe,wordpiece}/tokenizer.json and FOLDER/expected.json

Needs tokenizers.
"""

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LEARNED = ["the cat sat on the mat and the dog sat on the log", "this is the first of these things that are there"] * 3
TEXTS = ["the cat sat there", " these dogs\n\nand 12 thïngs", "naïve 日本 🙂!", "<|endoftext|>the end"]


def bpe():
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>"]
    made.train_from_iterator(LEARNED, trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, special_tokens=special))
    return made


def wordpiece():
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    made.train_from_iterator(LEARNED, trainers.WordPieceTrainer(vocab_size=60, special_tokens=special))
    made.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    # Published files enable padding and truncation, which a corpus must not have.
    made.enable_padding(length=8)
    made.enable_truncation(4)
    return made


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent / "data" / "tokenizers")
    expected = {}
    for make in [bpe, wordpiece]:
        (folder / make.__name__).mkdir(parents=True, exist_ok=True)
        made = make()
        made.save(str(folder / make.__name__ / "tokenizer.json"), pretty=False)
        made.no_padding()
        made.no_truncation()
        ids = [made.encode(text, add_special_tokens=False).ids for text in TEXTS]
        expected[make.__name__] = [{"text": t, "ids": i, "back": made.decode(i)} for t, i in zip(TEXTS, ids)]
    (folder / "expected.json").write_text(json.dumps(expected, ensure_ascii=False, indent=1) + "\n")
