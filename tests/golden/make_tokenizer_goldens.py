#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes tests/golden/tokenizers: one small tokenizer.json per family of models, and what Hugging Face's `tokenizers`
(0.23) makes of texts chosen to hurt. Run by hand when a family or a text is added: NAMEs of the
new ones, or nothing for all; needs PyPI tokenizers."""
import json
import pathlib
import random
import sys
import unicodedata

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

OUT = pathlib.Path(__file__).parent / "tokenizers"
TRAINING = [
    "The quick brown fox said that the hound of the moor was not there; they'll say I'M wrong, we've 1234 and 56.\n\n",
    "def f(x_1):\r\n    return x_1 + 2  # naïve café, Größe “quoted” — dash\n\tindented 'til 2024\n",
    "русский текст и слова 中文文字 汉字 한국어 日本語 the thing and the other thing, something, anything, nothing\n",
] * 20
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + REST
QWEN = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + REST
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
NEMO = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}|" + REST
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
NOT_HAN = r"(?:(?!\p{Han})%s)"
KIMI = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{NOT_HAN % UPPER}*{NOT_HAN % LOWER}+{CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{NOT_HAN % UPPER}+{NOT_HAN % LOWER}*{CONTRACTIONS}?|\p{{N}}{{1,3}}|" + REST
)
DEEPSEEK_LLM = [
    r"[\r\n]",
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$",
    r"[一-龥ࠀ-一가-퟿]+", r"\p{N}+",
]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def split(pattern, behavior="isolated", invert=False):
    return pre_tokenizers.Split(Regex(pattern), behavior, invert)


def byte_level(prefix=False, regex=False):
    return pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=regex)


def trained(size, model, pre=None, norm=None, decoder=None, special=("<s>", "</s>"), alphabet=(), limit=None):
    t = Tokenizer(model)
    if norm:
        t.normalizer = norm
    if pre:
        t.pre_tokenizer = pre
    if decoder:
        t.decoder = decoder
    options = {"limit_alphabet": limit} if limit else {}
    t.train_from_iterator(TRAINING, trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(special), initial_alphabet=list(alphabet), show_progress=False, **options))
    return t


def template(t):
    return processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B",
                                         special_tokens=[("<s>", t.token_to_id("<s>"))])


def of_bytes(pre, norm=None, size=430):
    t = trained(size, models.BPE(), pre, norm, decoders.ByteLevel(), alphabet=pre_tokenizers.ByteLevel.alphabet())
    t.add_special_tokens(["<|eot|>"])
    return t


def of_characters(pre=None, norm=None, decoder=None, special=("<unk>", "<s>", "</s>")):
    t = trained(520, models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"), pre, norm, decoder,
                list(special) + BYTES, limit=60)
    t.post_processor = template(t)
    j = json.loads(t.to_str())
    # Training wants the byte tokens to be special; in real files they are plain ones.
    j["added_tokens"] = [token for token in j["added_tokens"] if token["content"] not in BYTES]
    return j


def families():
    t = of_bytes(pre_tokenizers.Sequence([split(LLAMA3), byte_level()]))
    t.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template(t)])
    j = json.loads(t.to_str())
    j["model"]["ignore_merges"] = True
    del j["model"]["merges"][80:]
    yield "llama3", j

    t = of_bytes(pre_tokenizers.Sequence([split(QWEN), byte_level()]), normalizers.NFC())
    t.post_processor = processors.ByteLevel(trim_offsets=False)
    t.add_tokens([AddedToken("<think>", normalized=False), AddedToken("café", normalized=True),
                  AddedToken("word", single_word=True), AddedToken("<ls>", lstrip=True, normalized=False),
                  AddedToken("<rs>", rstrip=True, normalized=False), AddedToken("   ", normalized=False)])
    yield "qwen", json.loads(t.to_str())

    t = of_bytes(pre_tokenizers.Sequence([split(NEMO), byte_level()]))
    t.post_processor = template(t)
    yield "nemo", json.loads(t.to_str())
    yield "smollm", json.loads(of_bytes(
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level(regex=True)])).to_str())
    yield "prefix_space", json.loads(of_bytes(
        pre_tokenizers.Sequence([pre_tokenizers.Digits(), byte_level(prefix=True, regex=True)])).to_str())
    yield "deepseek", json.loads(of_bytes(pre_tokenizers.Sequence(
        [split(r"\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"), split(DEEPSEEK), byte_level()])).to_str())

    yield "deepseek_llm", json.loads(of_bytes(pre_tokenizers.Sequence([*map(split, DEEPSEEK_LLM), byte_level()])).to_str())
    yield "qwen35", json.loads(of_bytes(pre_tokenizers.Sequence([split(QWEN35), byte_level()]), normalizers.NFC()).to_str())
    yield "kimi", json.loads(of_bytes(pre_tokenizers.Sequence([split(KIMI), byte_level()])).to_str())

    llama2 = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                decoders.Strip(" ", 1, 0)])
    j = of_characters(
        norm=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), decoder=llama2)
    j["model"]["merges"] = [" ".join(pair) for pair in j["model"]["merges"]]
    yield "llama2", j
    yield "phi3", {**j, "added_tokens": [{**token, "rstrip": True} for token in j["added_tokens"]]}
    yield "mistral", of_characters(pre_tokenizers.Metaspace("▁", "first", False), decoder=llama2)
    yield "metaspace", of_characters(pre_tokenizers.Metaspace("▁", "always", True),
                                                decoder=decoders.Metaspace("▁", "always", True))
    yield "gemma", of_characters(
        pre_tokenizers.Split(" ", "merged_with_previous"), normalizers.Replace(" ", "▁"),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
        ("<unk>", "<s>", "</s>", "\n\n"))
    unknown = models.BPE(unk_token="<unk>", fuse_unk=False)
    yield "unknown", json.loads(trained(300, unknown, split(r"\w+", "merged_with_next", True), limit=40,
                                        special=("<unk>", "<s>")).to_str())
    for behavior in ("removed", "merged_with_previous", "contiguous"):
        yield "split_" + behavior, json.loads(of_bytes(pre_tokenizers.Sequence(
            [split(r"[^\S\n]+|\d", behavior), byte_level()]), size=300).to_str())


def texts():
    specials = ["<s>", "</s>", "<|eot|>", "<unk>", "<think>", "café", "cafe\u0301", "word", "<ls>", "<rs>", "   "]
    for token in specials:
        yield from (token, f"a{token}b", f" {token} x", token * 2, f"\n {token}\n  y", token[:-1], token[1:])
    yield from (
        "", " ", "a", "the thing", " the  thing   ", "they'll SAY I'M we'VE 'ſ 'S", "1", "12", "123", "1234", "1 23 456\n7890",
        "x\r\ny\r\n\r\nz\n\n\n", "\r", "\t\tx", "end \n", "\ufeffBOM", "nul\0nul", "a\u180eb \u180e c", "\u00a0x\u3000y\u2028z\u0085",
        "👩‍👩‍👧‍👦 family 🏳️‍🌈", "e\u0301 e\u0323\u0301 e\u0301\u0323", "\u1100\u1161\u11a8 한국어 \ud7a3", "Å Ω \u0344 \u0958 \uf900",
        "עִבְרִית العربية हिन्दी ไทย", "İıſßﬁ ǅ", "中文汉字日本語テキスト。", "русский ТЕКСТ", "<0x41><0x0A>", "▁▁the▁ thing", "\U0001d15e\U00020000",
        "e" + "\u0301\u0323" * 40, " " * 70 + "x", "a" * 200, "\n" * 50, "ab" * 60, "x" + " " * 9 + "\n" + " " * 9)
    r = random.Random(20)
    pools = [[chr(c) for c in range(32, 127)], [chr(c) for c in range(0x250)], list(" \n\r\t\u00a0\u180e\u3000\u2028\u200b\x85\x0b"),
             specials + ["the", " ", "'s", "12", "é", "e\u0301", "中", "한", "👩‍👧", "\0"]]
    for i in range(60):
        pool = pools[i % 4]
        yield "".join(r.choice(pool) for _ in range(r.randrange(1, 25)))
    for _ in range(10):
        yield "".join(c for c in map(chr, (r.randrange(0x20, 0x3000) for _ in range(12))) if unicodedata.category(c) != "Cn")


def fnv(data):
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return f"{value:016x}"


def of_ids(ids):
    return b"".join(id.to_bytes(4, "little") for id in ids)


def assigned_ranges():
    """[first, last] of the characters that Unicode 14 has, private use left out."""
    ranges = []
    for c in range(0x110000):
        if unicodedata.category(chr(c)) in ("Cn", "Co", "Cs"):
            continue
        if ranges and ranges[-1][1] == c - 1:
            ranges[-1][1] = c
        else:
            ranges.append([c, c])
    return ranges


def single_characters(t, ranges):
    """A checksum of the tokens of every character, for each 4096 of them."""
    sums, data = [], bytearray()
    count = 0
    for first, last in ranges:
        for c in range(first, last + 1):
            data += of_ids(t.encode(f"a{chr(c)}b {chr(c)}1{chr(c)}{chr(c)}", add_special_tokens=False).ids)
            count += 1
            if count % 4096 == 0:
                sums.append(fnv(data))
                data.clear()
    return sums + [fnv(data)]


def main():
    OUT.mkdir(exist_ok=True)
    cases, ranges = list(texts()), assigned_ranges()
    write = lambda name, value: (OUT / name).write_text(json.dumps(value, separators=(",", ":")) + "\n")
    write("texts.json", {"texts": cases, "assigned": ranges})
    for name, spec in families():
        if len(sys.argv) > 1 and name not in sys.argv[1:]:
            continue
        write(f"{name}.tokenizer.json", spec)
        t = Tokenizer.from_str(json.dumps(spec))
        golden = {"parsed": [t.encode(text).ids for text in cases]}
        golden["decoded"] = [fnv(t.decode(ids, skip_special_tokens=False).encode()) for ids in golden["parsed"]]
        t.encode_special_tokens = True
        golden["as_text"] = fnv(b"".join(of_ids(t.encode(text, add_special_tokens=False).ids) for text in cases))
        if name in ("qwen", "nemo", "deepseek", "deepseek_llm", "qwen35", "kimi"):
            golden["characters"] = single_characters(t, ranges)
        write(f"{name}.golden.json", golden)


if __name__ == "__main__":
    main()
