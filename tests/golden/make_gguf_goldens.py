# SPDX-License-Identifier: Apache-2.0
"""Makes tests/golden/gguf: a small SentencePiece tokenizer as a GGUF file, and what sentencepiece makes of texts chosen to hurt.

    python3 tests/golden/make_gguf_goldens.py     (needs sentencepiece, gguf; run once, outputs are committed)
"""
import io
import json
import pathlib

import gguf
import sentencepiece

from make_tokenizer_goldens import TRAINING

HERE = pathlib.Path(__file__).parent / "gguf"
TEXTS = HERE.parent / "tokenizers" / "texts.json"


def kind(sp: sentencepiece.SentencePieceProcessor, token: int) -> int:
    types = gguf.TokenType
    return int(types.UNKNOWN if sp.is_unknown(token) else types.CONTROL if sp.is_control(token) else types.BYTE if sp.is_byte(token)
               else types.UNUSED if sp.is_unused(token) else types.NORMAL)


def main() -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter("".join(TRAINING).splitlines()), model_writer=model, model_type="bpe", vocab_size=520,
        byte_fallback=True, normalization_rule_name="identity", add_dummy_prefix=True, remove_extra_whitespaces=False,
        character_coverage=0.99, split_digits=True, allow_whitespace_only_pieces=True)
    sp = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    writer = gguf.GGUFWriter(HERE / "sentencepiece.gguf", "llama")
    ids = range(sp.vocab_size())
    writer.add_tokenizer_model("llama")
    writer.add_token_list([sp.id_to_piece(i) for i in ids])
    writer.add_token_scores([sp.get_score(i) for i in ids])
    writer.add_token_types([kind(sp, i) for i in ids])
    writer.add_bos_token_id(sp.bos_id())
    writer.add_eos_token_id(sp.eos_id())
    writer.add_unk_token_id(sp.unk_id())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    texts = [t for t in json.loads(TEXTS.read_text())["texts"] if t]
    golden = [{"text": t, "ids": [sp.bos_id(), *sp.encode(t)], "decoded": sp.decode(sp.encode(t))} for t in texts]
    (HERE / "sentencepiece.json").write_text(json.dumps(golden, ensure_ascii=True, indent=0))


if __name__ == "__main__":
    main()
