"""Tiny random checkpoints of each supported family, in the usual format, with a tokenizer that covers every id."""

from __future__ import annotations

import json
from hashlib import blake2b
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

# transformers leaves these constructors untyped
_AutoModel: Any = AutoModelForCausalLM
_TokenizerFast: Any = PreTrainedTokenizerFast

FAMILIES = ("llama", "qwen2", "qwen3")
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_ID = 2
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_model(path: Path, family: str = "llama", seed: int = 0, **overrides: object) -> Path:
    """A checkpoint directory under path; made once for the same arguments.

    Weights are drawn wide (initializer_range): at the usual 0.02 attention is so flat that wrong KV changes no token.
    """
    settings = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "pad_token_id": 0,
        **overrides,
    }
    name = blake2b(json.dumps([family, seed, settings], sort_keys=True).encode(), digest_size=6).hexdigest()
    directory = path / f"{family}-{name}"
    if not (directory / "tokenizer.json").is_file():
        config = AutoConfig.for_model(family, **settings)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = _AutoModel.from_config(config, dtype=torch.float32)
        model.save_pretrained(directory)
        _tokenizer(config.vocab_size).save_pretrained(directory)
    return directory


def _tokenizer(vocab_size: int) -> Any:
    """Byte-level BPE: the special tokens, all 256 bytes, then pairs and triples of letters, up to vocab_size."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(a, b) for a, b in product(ascii_lowercase, repeat=2)]
    triples = [(a + b, c) for a, b, c in product(ascii_lowercase, repeat=3)]
    merges = (pairs + triples)[: vocab_size - len(SPECIAL_TOKENS) - len(alphabet)]
    texts = [*SPECIAL_TOKENS, *alphabet, *(a + b for a, b in merges)]
    assert len(texts) == vocab_size, f"a vocabulary of {vocab_size} cannot be covered"
    tokenizer = Tokenizer(models.BPE({text: index for index, text in enumerate(texts)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    fast = _TokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL_TOKENS[EOS_ID], pad_token=SPECIAL_TOKENS[0])
    fast.chat_template = CHAT_TEMPLATE
    return fast
