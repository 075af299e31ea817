# SPDX-License-Identifier: Apache-2.0
"""A tiny random Llama of transformers whose tokens are words: "question", and w0 to w149."""

import tokenizers
import transformers

WORDS = [f"w{i}" for i in range(150)]


def word_tokenizer():
    vocab = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", "question", *WORDS])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def word_model(max_positions):
    """Of as many positions, with the weights that torch's seed gives."""
    config = transformers.LlamaConfig(
        vocab_size=160, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=max_positions, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config).eval()
