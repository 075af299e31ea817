# SPDX-License-Identifier: Apache-2.0
"""What a document costs in published models, from their configurations: the table of docs/results/models.md.

    python3 scripts/model_costs.py              prints it
    python3 scripts/model_costs.py --check      fails where the page has another

scripts/model_shapes.json holds what their config.json files say of sizes, under the names that these have there.
"""
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs/results/models.md"
WEIGHT_BYTES = 4.5 / 8
NUMBER_BYTES = 2  # of f16 keys and values
STATE_BYTES = 4   # states are float32
DOCUMENT = 32 * 1024


class Model:
    def __init__(self, config: dict):
        self.c = config
        self.layers, self.d, self.heads = config["num_hidden_layers"], config["hidden_size"], config["num_attention_heads"]
        self.size = config.get("head_dim", self.d // self.heads)

    def get(self, key: str, otherwise=0):
        return self.c.get(key, otherwise)

    def is_recurrent(self, i: int) -> bool:
        every = self.get("full_attention_interval")
        return every > 0 and (i + 1) % every != 0

    def has_window(self, i: int) -> bool:
        every = self.get("sliding_window_pattern")
        if self.c["model_type"] == "gpt_oss":
            return i % every == 0
        return every > 0 and (i + 1) % every != 0

    def has_rows(self, i: int) -> bool:
        return not self.is_recurrent(i) and i < self.layers - self.get("num_kv_shared_layers")

    def head(self, i: int) -> tuple[int, int]:
        """KV heads of a layer and their size."""
        kv = self.get("num_key_value_heads", self.heads)
        if self.has_window(i) or "global_head_dim" not in self.c:
            return kv, self.size
        return self.get("num_global_key_value_heads", kv), self.c["global_head_dim"]

    def row_bytes(self, i: int) -> int:
        """Of a token's keys and values in a layer that has some."""
        if self.get("kv_lora_rank"):
            return NUMBER_BYTES * (self.c["kv_lora_rank"] + self.c["qk_rope_head_dim"])
        kv, size = self.head(i)
        return 2 * NUMBER_BYTES * kv * size

    def kv_bytes(self) -> int:
        """What a token adds for good."""
        return sum(self.row_bytes(i) for i in range(self.layers) if self.has_rows(i) and not self.has_window(i))

    def read_bytes(self) -> int:
        """What each token before it costs a step: layers that share rows read them each."""
        return sum(self.row_bytes(i) for i in range(self.layers) if not self.is_recurrent(i) and not self.has_window(i))

    def window_bytes(self) -> int:
        return sum(self.row_bytes(i) * self.get("sliding_window") for i in range(self.layers) if self.has_rows(i) and self.has_window(i))

    def stored_bytes(self) -> int:
        """Of a token in a store, which holds the rows of layers with a window for the whole text."""
        return sum(self.row_bytes(i) for i in range(self.layers) if self.has_rows(i))

    def state_bytes(self) -> int:
        c, recurrent = self.c, sum(self.is_recurrent(i) for i in range(self.layers))
        if recurrent == 0:
            return 0
        keys, values = (c[f"linear_num_{k}_heads"] * c[f"linear_{k}_head_dim"] for k in ("key", "value"))
        return recurrent * STATE_BYTES * ((c["linear_conv_kernel_dim"] - 1) * (2 * keys + values) + c["linear_key_head_dim"] * values)

    def mixing(self, i: int) -> int:
        """Weights of attention, or of what stands in its place."""
        c, d, heads = self.c, self.d, self.heads
        if self.is_recurrent(i):
            keys, values = (c[f"linear_num_{k}_heads"] * c[f"linear_{k}_head_dim"] for k in ("key", "value"))
            return d * (2 * keys + 2 * values + 2 * c["linear_num_value_heads"]) + values * d
        if self.get("kv_lora_rank"):
            query, rank = c["qk_nope_head_dim"] + c["qk_rope_head_dim"], self.get("q_lora_rank")
            q = rank * (d + heads * query) if rank else d * heads * query
            return q + d * (c["kv_lora_rank"] + c["qk_rope_head_dim"]) + heads * (
                c["kv_lora_rank"] * (c["qk_nope_head_dim"] + c["v_head_dim"]) + c["v_head_dim"] * d)
        kv, size = self.head(i)
        gate = self.get("full_attention_interval") > 0  # hybrids' attention is gated
        made = (1 if self.get("attention_k_eq_v") and not self.has_window(i) else 2) if self.has_rows(i) else 0
        return d * size * ((3 if gate else 2) * heads + made * kv)

    def feed_forward(self, i: int) -> tuple[int, int]:
        """Weights that a token goes through, and all."""
        c, d = self.c, self.d
        experts = next((c[k] for k in ("num_experts", "num_local_experts", "n_routed_experts") if k in c), 0)
        if experts == 0 or i < self.get("first_k_dense_replace"):
            wide = 2 if self.get("use_double_wide_mlp") and not self.has_rows(i) else 1
            return (3 * d * c["intermediate_size"] * wide,) * 2
        one = 3 * d * c.get("moe_intermediate_size", c.get("intermediate_size"))
        shared = 3 * d * self.get("shared_expert_intermediate_size") + one * self.get("n_shared_experts") + d * experts
        return shared + one * c["num_experts_per_tok"], shared + one * experts

    def weights(self) -> tuple[int, int]:
        """Those that a token is multiplied with, and all."""
        embedding, active = self.c["vocab_size"] * self.d, 0
        per_layer = self.get("hidden_size_per_layer_input")
        everything = embedding * (1 if self.get("tie_word_embeddings", False) else 2)
        everything += self.get("vocab_size_per_layer_input") * self.layers * per_layer
        for i in range(self.layers):
            own, all_of_them = self.feed_forward(i)
            same = self.mixing(i) + 3 * self.d * per_layer  # projection, gate and back
            active += own + same
            everything += all_of_them + same
        return active + embedding, everything


def giga(n: float) -> str:
    return f"{n / 1e9:.3f}" if n < 1e9 else f"{n / 1e9:.1f}" if n < 1e11 else f"{n / 1e9:.0f}"


def fixed(model: Model) -> str:
    parts = [(model.window_bytes(), "windows"), (model.state_bytes(), "states")]
    return ", ".join(f"{what}, {n / 1e6:.0f} MB" for n, what in parts if n > 0)


def row(name: str, model: Model) -> str:
    (active, everything), kv = model.weights(), model.kv_bytes()
    half = active * WEIGHT_BYTES / model.read_bytes() / 1000
    file = (kv * DOCUMENT + model.state_bytes()) / 2**30
    return (f"| {name} | {giga(active)} of {giga(everything)} G | {kv / 1024:.4g} KiB | {fixed(model)} | {half:.0f}k | "
            f"{2 * active * DOCUMENT / 1e15:.2g} P | {file:.2g} GiB | {model.stored_bytes() * DOCUMENT / 2**30:.2g} GiB |")


def table() -> str:
    shapes = json.loads((ROOT / "scripts/model_shapes.json").read_text())
    head = ["| model | active of all weights | KV a token | fixed | half a step at | 32k: operations saved | 32k: what must be kept | 32k: rows in a file |",
            "|---|---|---|---|---|---|---|---|"]
    return "\n".join(head + [row(name, Model(config)) for name, config in shapes.items()])


def main() -> int:
    made = table()
    if "--check" not in sys.argv:
        print(made)
        return 0
    if made in PAGE.read_text():
        return 0
    print(f"{PAGE}: expected the table that scripts/model_costs.py makes, found another", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
